"""Why a run parts from the one with the fewest processes, told from the numbers of the step where it does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from instep.verify.across.quantities import StepRow
from instep.verify.parting import Cause, processes
from instep.verify.records import Record
from instep.verify.vectors import Vectors, fit_factor, fit_weights
from instep.verify.within.gradients import CLOSE


@dataclass(frozen=True)
class Pair:
    """Two runs and the step that is looked at."""

    reference: Record
    other: Record
    number: int

    @property
    def times(self) -> float:
        return self.other.world_size / self.reference.world_size

    def gradients(self) -> tuple[Vectors, Vectors]:
        one, two = self.reference.step(self.number)[0], self.other.step(self.number)[0]
        return one.unscaled("reduced"), two.unscaled("reduced")

    def line(self) -> str:
        passes = self.other.step(self.number)[0].facts["backwards"]
        return passes[-1]["line"] if passes else ""


def why_initial_weights(pair: Pair) -> Cause:
    seen = f"{processes(pair.other.world_size)} begin with other weights than {processes(pair.reference.world_size)}"
    return Cause(
        "initial-weights",
        f"{seen}: the seed, or how many random numbers were drawn before the model was built, depends on the "
        "number of processes.",
        "Call torch.manual_seed with a fixed number right before the model is built.",
        pair.other.step(pair.number)[0].facts.get("wrap_line", ""),
    )


def why_samples(pair: Pair) -> Cause:
    """The steps hold the same number of samples, or nearly, but not the same ones."""
    here, there = pair.reference.samples(pair.number), pair.other.samples(pair.number)
    extra, missing = there - here, here - there
    laps = pair.other.ranks[0].named("lap")
    line = laps[-1]["line"] if laps else next((n["line"] for n in pair.other.ranks[0].named("loader")), "")
    ends = [_epochs_ended(record, pair.number) for record in (pair.reference, pair.other)]
    if ends[0] != ends[1]:
        shorter = pair.other if ends[1] > ends[0] else pair.reference
        return Cause(
            "epoch-length",
            f"Before this step {processes(pair.reference.world_size)} had ended {ends[0]} epochs and {processes(pair.other.world_size)} "
            f"{ends[1]}: an epoch has fewer steps with {processes(shorter.world_size)}, as the last batch is dropped, filled up or "
            "counted for each rank by itself.",
            "Choose a global batch that divides the data, or count in steps instead of epochs; instep.Run's epochs have "
            "the same steps on any number of processes.",
            line,
        )
    before = _union(pair.other, range(1, pair.number))
    whole = _union(pair.reference, range(1, pair.reference.num_steps + 1))
    padded = laps and not laps[-1]["drop_last"] and laps[-1]["length"] % pair.other.world_size
    if extra and not missing and all(one in before for one in extra):
        why = "DistributedSampler repeats samples" if padded else "the ranks' parts are filled up with samples"
        return Cause(
            "padding",
            f"The last step of the epoch has {extra.total()} samples a second time: {why} so that every rank gets "
            f"as many ({pair.other.world_size} ranks do not divide the data).",
            "Use drop_last=True, a dataset length that the ranks divide, or instep.Run's loader, which repeats none.",
            line,
        )
    if missing and not extra:
        return Cause(
            "drop-last",
            f"{missing.total()} samples that {processes(pair.reference.world_size)} trained on in this step are left out: with "
            "drop_last, what does not fill a batch of every rank is dropped.",
            "Choose a global batch that divides the data, or leave drop_last out; instep.Run's loader has a shorter "
            "last step instead.",
            line,
        )
    known = sum((there & whole).values())
    seen = f"{known} of its {there.total()} samples are among those of {processes(pair.reference.world_size)}" if known else (
        f"none of its samples is among those of {processes(pair.reference.world_size)}"
    )  # fmt: skip
    return Cause(
        "data-order",
        f"The samples of the step are others; in {whole.total()} samples of all steps, {seen}. Which samples come when "
        "depends on the number of processes: each rank shuffles a part of its own, or draws with a seed of its own.",
        "Shuffle the whole dataset by a seed and the epoch alone, equally on all ranks, and give each rank every N-th "
        "sample of that order, as DistributedSampler with set_epoch and instep.Run's loader do (in accelerate: "
        "DataLoaderConfiguration(use_seedable_sampler=True)).",
        line,
    )


def _epochs_ended(record: Record, number: int) -> int:
    """Epochs of a sampler that ended before a step."""
    return sum(lap["lap"] > 0 and lap["after"] < number for lap in record.ranks[0].named("lap"))


def _union(record: Record, numbers: range) -> Counter[str]:
    return sum((record.samples(number) for number in numbers), Counter())


def why_rates(pair: Pair, row: StepRow) -> Cause:
    one, two = row.rates[0], row.rates[1]
    line = pair.other.step(pair.number)[0].facts.get("scheduler_line", "")
    calls = [sum(record.step(k)[0].facts["scheduled"] for k in range(1, pair.number + 1)) for record in
             (pair.reference, pair.other)]  # fmt: skip
    if pair.number > 1 and calls[0] != calls[1]:
        return Cause(
            "scheduler-steps",
            f"The scheduler has been stepped {calls[1]} times before this step on {processes(pair.other.world_size)} and "
            f"{calls[0]} times on {processes(pair.reference.world_size)}: its schedule runs at another speed.",
            "Step the scheduler once per optimizer step, whatever the number of processes (accelerate does it once per "
            "process unless step_scheduler_with_optimizer or split_batches says otherwise).",
            line,
        )
    ratio = two[0] / one[0] if one and two and one[0] else 0.0
    if abs(ratio - pair.times) < 1e-6 * pair.times:
        return Cause(
            "rate-scaled",
            f"The learning rate is multiplied by the number of processes ({one[0]:g} -> {two[0]:g}), while the global "
            "batch is the same. Scaling is meant for a batch that grows with the processes.",
            "Leave the learning rate alone when the global batch stays, or tie both to the batch.",
        )
    return Cause(
        "rates",
        f"The learning rate is {two} on {processes(pair.other.world_size)} and {one} on "
        f"{processes(pair.reference.world_size)}.",
        "Compute the learning rate from steps and the global batch, not from numbers of batches per process.",
        line,
    )


def why_numbers(pair: Pair, row: StepRow) -> Cause:
    """The samples, the weights before and the learning rate agree, but loss or gradients do not."""
    return (
        _gathered(pair, row)
        or _factor(pair, row)
        or _mean_of_means(pair)
        or _random(pair)
        or Cause(
            "unknown",
            "The same samples and weights give other numbers, by no common factor and by no weights of the ranks. "
            "Something in the model or the loss depends on how the batch is split.",
            "Look for statistics or normalisation over the batch, for sorting or sampling inside it, and for code that "
            "asks for the rank or the number of processes.",
            pair.line(),
        )
    )


def _gathered(pair: Pair, row: StepRow) -> Cause | None:
    gathers = [one for update in pair.other.step(pair.number) for one in update.facts["gathered"]]
    loss = row.differences.get("loss")
    if not gathers:
        return None
    same = "The loss is that of the whole batch, but its gradients are not" if loss and not loss.is_beyond else (
        "Features of all ranks go into the loss"
    )  # fmt: skip
    return Cause(
        "gathered-without-gradients",
        f"{same}: all_gather at {gathers[0]['line']} hands out the features of the other ranks without their graph, so "
        "a rank's features get no gradient from the terms of the others.",
        "Gather with torch.distributed.nn.functional.all_gather, which has a backward, or use step.all_rows of "
        "instep.Run.",
        gathers[0]["line"],
    )


def _factor(pair: Pair, row: StepRow) -> Cause | None:
    fit = fit_factor(*pair.gradients())
    if fit is None or fit.rest > CLOSE or abs(fit.factor - 1) <= CLOSE:
        return None
    times, factor = pair.times, fit.factor
    losses = row.losses
    ratio = losses[1] / losses[0] if losses[0] and losses[1] is not None else None
    carried = ratio is not None and abs(ratio - factor) < CLOSE * abs(factor)
    where = "The loss carries the same factor" if carried else "The loss does not carry it"
    passes = [len(record.step(pair.number)[0].facts["backwards"]) for record in (pair.reference, pair.other)]
    named, why, fix = _name_factor(factor, times, carried, passes)
    return Cause(
        "constant-factor",
        f"Every gradient is {factor:.4g} times that of {processes(pair.reference.world_size)}: {named}. {where}: {why}.",
        fix,
        pair.line(),
    )


def _name_factor(factor: float, times: float, carried: bool, passes: list[int]) -> tuple[str, str, str]:
    """The factor in words, why it is there, and what to do."""
    if passes[0] != passes[1] and abs(factor - passes[1] / passes[0]) < CLOSE * factor:
        return (
            f"the number of micro-batches per step, {passes[1]} instead of {passes[0]}",
            "losses of micro-batches are added without dividing by their number",
            "Divide each loss by the number of micro-batches of the step.",
        )
    if abs(factor - 1 / times) < CLOSE / times:
        why = (
            "it is divided by the number of processes, or is a sum over the samples of a rank, and averaging divides "
            "once more" if carried else "gradients are divided by the number of processes once too often"
        )  # fmt: skip
        return (
            f"1 / {times:g}, the number of processes",
            why,
            "Use the mean over the rank's own samples and leave the division to the average over ranks; multiply a sum "
            "by the number of processes.",
        )
    if abs(factor - times) < CLOSE * times:
        why = (
            "it is multiplied by the number of processes" if carried
            else "gradients are summed over ranks instead of averaged"
        )  # fmt: skip
        return (
            f"{times:g}, the number of processes",
            why,
            "Divide by the number of processes after the all-reduce (or use ReduceOp.AVG), and leave the loss alone.",
        )
    return (
        f"{factor:.6g}",
        "something that depends on the number of processes multiplies it",
        "Look for a factor made of the batch size, the world size or the accumulation steps.",
    )


def _mean_of_means(pair: Pair) -> Cause | None:
    """Weights of the ranks' gradients, other than equal ones, that give the gradient of the whole batch."""
    if pair.reference.world_size != 1:
        return None
    scale = float(pair.other.step(pair.number)[0].facts["scale"])
    parts = [{n: v / scale for n, v in u.vectors["local"].items()} for u in pair.other.step(pair.number)]
    fit = fit_weights(parts, pair.gradients()[0]) if all(parts) else None
    if fit is None or fit[1] > 10 * CLOSE or abs(sum(fit[0]) - 1) > 10 * CLOSE:
        return None
    shares = " : ".join(f"{weight:.3f}" for weight in fit[0])
    counts = [u.facts["tokens"][0]["counted"] for u in pair.other.step(pair.number) if u.facts["tokens"]]
    rows = [len(u.facts["samples"]) for u in pair.other.step(pair.number)]
    items = "items of their loss"
    if len(counts) == len(parts):
        items = f"targets that count ({', '.join(map(str, counts))})"
    elif len(set(rows)) > 1:
        items = f"samples ({', '.join(map(str, rows))})"
    tokens = pair.other.step(pair.number)[0].facts["tokens"]
    return Cause(
        "mean-of-means",
        f"Each rank's loss is a mean over its own {items}, and the ranks are averaged with equal weight. One process "
        f"weighs them {shares}: the gradient is a mean of means over different numbers of things.",
        "Sum the loss, divide by the number of items over all ranks (one all-reduce) and multiply by the number of "
        "ranks; in instep: step.backward(loss, weight=number_of_items).",
        tokens[0]["line"] if tokens else pair.line(),
    )


def _random(pair: Pair) -> Cause | None:
    if not any(update.facts["draws"] for update in pair.other.step(pair.number)):
        return None
    return Cause(
        "random-forward",
        "Random numbers are drawn between a batch and its backward pass (dropout is off), as for noise or mixing samples, "
        "and another number of processes draws others; these numbers cannot be compared.",
        "Make the draws depend on the sample, as instep.Run does for each micro-batch.",
        pair.line(),
    )

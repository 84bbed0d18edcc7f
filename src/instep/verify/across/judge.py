"""One run against the one with the fewest processes: in step, or where it parts and why, or why it cannot be told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from instep.verify.across.causes import Pair, why_initial_weights, why_numbers, why_rates, why_samples
from instep.verify.across.metrics import judge_metrics
from instep.verify.across.quantities import HOOKS, Noise, StepRow, choose_tolerance, compare_step
from instep.verify.parting import Cause, Parting, processes
from instep.verify.records import Record
from instep.verify.tolerance import Tolerance
from instep.verify.within.weights import averages_parameters, order_cause

NOT_EXACT = Cause(
    "not-exact",
    "The numbers agree within their tolerance but not in every bit, which --exact asks for: they were added in another "
    "order.",
    "Train through instep.Run(exact=True); every other way to add over ranks has an order of its own.",
)
BATCH_NORM = "batch norm takes its statistics over the samples of one rank, which are fewer on more processes"
JUDGED = ("loss", "gradients", "gradient norm", "parameters", "buffers")


@dataclass
class Comparison:
    """rows: the table; by_rights: what batch norm makes, said and not counted; open_questions: what could not be
    compared, and why."""

    world_size: int
    tolerance: Tolerance
    rows: list[StepRow] = field(default_factory=list[StepRow])
    partings: list[Parting] = field(default_factory=list[Parting])
    by_rights: list[str] = field(default_factory=list[str])
    open_questions: list[str] = field(default_factory=list[str])


def compare_runs(reference: Record, other: Record, exact: bool, repeat: Callable[[], Record]) -> Comparison:
    """repeat: runs the reference once more, to tell metrics from measurements of time and the like."""
    result = Comparison(other.world_size, choose_tolerance(reference, other))
    noise, averaged = Noise(), averages_parameters(other)
    for number in range(1, min(reference.num_steps, other.num_steps) + 1):
        row = compare_step(reference, other, number, result.tolerance, noise, averaged)
        result.rows.append(row)
        if not result.partings and not result.open_questions:
            _judge_step(result, Pair(reference, other, number), row, exact)
    if not result.open_questions and not result.by_rights:
        until = min((parting.step for parting in result.partings), default=len(result.rows) + 1) - 1
        metric = judge_metrics(reference, other, min(until, len(result.rows)), reference)
        if metric is not None:
            metric = judge_metrics(reference, other, metric.step, repeat())
        result.partings += [metric] if metric is not None else []
    if result.by_rights:
        result.by_rights = [_describe_rights(result, result.by_rights[0])]
    return result


def _judge_step(result: Comparison, pair: Pair, row: StepRow, exact: bool) -> None:
    """Adds the first quantity of the step that is beyond its tolerance, in the order of cause and effect."""
    if (order := _other_order(pair)) is not None:
        result.partings.append(Parting(row.step, "parameter order", "runs", pair.other.world_size, order))
        return
    start = row.differences.get("initial weights")
    if start is not None and start.is_beyond and row.step == 1:
        _add(result, row, "initial weights", why_initial_weights(pair))
        return
    if not row.same_samples and not _sees_the_same(pair, row):
        _judge_samples(result, pair, row)
        return
    if not _same_rates(row):
        cause = why_rates(pair, row)
        result.partings.append(Parting(row.step, "learning rate", "runs", pair.other.world_size, cause))
        return
    if not all(loss is None or math.isfinite(loss) for loss in row.losses[:1]):
        result.open_questions.append(
            f"The loss of step {row.step} is {row.losses[0]} on {processes(pair.reference.world_size)} already; nothing can "
            "be compared from there on. Make the script train there first; `instep run` says where the number comes from."
        )
        return
    rights = _what_differs_by_rights(pair)
    if rights:
        result.by_rights.append(rights)
        return
    for quantity in JUDGED:
        if quantity in row.differences and row.differences[quantity].is_beyond:
            cause = _why_after(pair) if quantity in ("parameters", "buffers") else why_numbers(pair, row)
            if cause.id == "random-forward":
                result.open_questions.append(cause.text)
            else:
                _add(result, row, quantity, cause)
            return
    if exact:
        _judge_bits(result, pair, row)


def _add(result: Comparison, row: StepRow, quantity: str, cause: Cause) -> None:
    found = row.differences[quantity]
    result.partings.append(
        Parting(row.step, quantity, "runs", result.world_size, cause, found.name, found.relative, found.tolerance)
    )


def _other_order(pair: Pair) -> Cause | None:
    names = [record.step(pair.number)[0].facts["model_names"] for record in (pair.reference, pair.other)]
    if names[0] == names[1] or sorted(names[0]) != sorted(names[1]):
        return None
    place = next(i for i, (one, two) in enumerate(zip(*names)) if one != two)
    sizes = pair.reference.world_size, pair.other.world_size
    line = pair.other.step(pair.number)[0].facts.get("wrap_line", "")
    return order_cause(
        names[0][place], names[1][place], f"with {processes(sizes[0])}", f"with {processes(sizes[1])}", line
    )


def _sources(pair: Pair) -> set[str]:
    """Where samples were seen: at a DataLoader, or as inputs of a model, which may have been computed."""
    records = pair.reference, pair.other
    return {update.facts["sample_source"] for record in records for update in record.step(pair.number)}


def _sees_the_same(pair: Pair, row: StepRow) -> bool:
    """Whether samples that differ are the same data after all. What a model got as inputs may be another model's output,
    which differs by rounding, and a model may be run again over the same inputs; then the numbers decide."""
    if _sources(pair) != {"inputs"} or not row.samples[2]:
        return False
    distinct = [set(record.samples(pair.number)) for record in (pair.reference, pair.other)]
    numbers = [row.differences[key] for key in ("loss", "gradients") if key in row.differences]
    return distinct[0] == distinct[1] or (not _has_local_batch_norm(pair) and not any(n.is_beyond for n in numbers))


def _judge_samples(result: Comparison, pair: Pair, row: StepRow) -> None:
    """The step cannot be compared, as its samples differ: says why not, or who is to blame."""
    one, two, both = row.samples
    if _sources(pair) == {"inputs"} and both == 0:
        result.open_questions.append(
            "The samples come from no DataLoader but from random generators or from the model itself, and each number of "
            "processes draws others; only the ranks of a run can be compared with each other."
        )
    elif pair.number == 1 and one and two != one and two % one == 0 and two // one == pair.times:
        result.open_questions.append(
            f"A step has {one} samples on {processes(pair.reference.world_size)} and {two} on "
            f"{processes(pair.other.world_size)}: "
            "the script states a batch per process, so the runs train with different global batches. Give --divide NAME "
            "for the script's argument that sets the batch, or --single with a command line for one process."
        )
    else:
        result.partings.append(Parting(row.step, "samples", "runs", pair.other.world_size, why_samples(pair)))


def _same_rates(row: StepRow) -> bool:
    one, two = row.rates
    return len(one) == len(two) and all(abs(a - b) <= 1e-9 * max(abs(a), abs(b)) for a, b in zip(one, two))


def _has_local_batch_norm(pair: Pair) -> bool:
    return not pair.other.uses_run and any(u.facts["batch_norm"] for u in pair.other.step(pair.number))


def _what_differs_by_rights(pair: Pair) -> str:
    """Why loss and gradients cannot agree although nothing is wrong; empty when they should."""
    if _has_local_batch_norm(pair):
        return BATCH_NORM
    hook = pair.other.step(pair.number)[0].facts.get("hook")
    return f"the communication hook {hook} changes gradients on their way" if hook and hook not in HOOKS else ""


def _why_after(pair: Pair) -> Cause:
    kind = pair.other.step(pair.number)[0].facts["optimizer_kind"]
    return Cause(
        "update",
        f"Loss, gradients and learning rate agree, but what {kind} makes of them does not: clipping, weight decay, "
        "momentum or a change of weights outside the optimizer depends on the number of processes.",
        "Look at what happens between backward and the end of the step, and at the optimizer's arguments.",
        pair.other.step(pair.number)[0].facts["line"],
    )


def _judge_bits(result: Comparison, pair: Pair, row: StepRow) -> None:
    """Gradients and parameters bit by bit, and the losses of all micro-batches, which only instep.Run keeps equal."""
    one, two = pair.reference.step(pair.number)[0].facts, pair.other.step(pair.number)[0].facts
    if pair.other.uses_run and len({_losses(record, pair.number) for record in (pair.reference, pair.other)}) > 1:
        found = row.differences.get("loss")
        apart = found.relative if found is not None else None
        result.partings.append(Parting(row.step, "loss", "runs", result.world_size, NOT_EXACT, "", apart, 0.0))
        return
    for quantity, key in (("gradients", "gradient_bits"), ("parameters", "parameter_bits")):
        name = next((n for n, bits in one[key].items() if two[key].get(n, bits) != bits), None)
        if name is not None:
            found = row.differences[quantity]
            result.partings.append(
                Parting(row.step, quantity, "runs", result.world_size, NOT_EXACT, name, found.relative, 0.0)
            )
            return


def _losses(record: Record, number: int) -> tuple[float, ...]:
    agreed = record.step(number)[0].facts.get("agreed_loss")
    if agreed is not None:
        return (agreed,)
    return tuple(sorted(one["loss"] or 0.0 for update in record.step(number) for one in update.facts["backwards"]))


def _describe_rights(result: Comparison, why: str) -> str:
    largest = {key: max((row.differences[key].relative for row in result.rows if key in row.differences), default=0.0)
               for key in ("loss", "gradients", "parameters", "buffers")}  # fmt: skip
    listed = ", ".join(f"{key} {value:.1e}" for key, value in largest.items())
    cure = (
        " Synchronised batch norm, or instep.Run, which takes statistics over micro-batches, would make them equal."
        if why == BATCH_NORM else ""
    )  # fmt: skip
    return (
        f"{why}, so these numbers rightly differ and are not judged ({listed}); ranks are compared with each other, "
        f"samples, initial weights and learning rates with the reference.{cure}"
    )

"""Whether the gradients that an optimizer uses are the mean of the ranks' own."""

from __future__ import annotations

from collections.abc import Iterator

from instep.verify.parting import Cause, Parting
from instep.verify.records import Record, Update
from instep.verify.vectors import farthest, fit_factor, mean, scales
from instep.verify.within.weights import SAME, is_split

CLOSE = 1e-3  # relative rest of a fit: above any rounding in fp32, below any mistake


def different_gradients(record: Record) -> Iterator[Parting]:
    for number in range(1, record.num_steps + 1):
        updates = record.step(number)
        facts = updates[0].facts
        goes_through = facts["wrapped_forwards"] and facts["backwards"] and facts["backwards"][-1]["synced"]
        if is_split(updates) or (facts.get("hook") and goes_through):
            return  # a hook may keep gradients local, as that of local SGD does
        first = updates[0].vectors["reduced"]
        sizes = scales(first)
        for update, rank in zip(updates[1:], record.ranks[1:]):
            other = update.vectors["reduced"]
            gap = farthest(first, other, sizes)
            only = sorted(first.keys() ^ other.keys())
            if gap.relative > SAME * 10 or only:
                cause = why_not_reduced(updates, rank.number)
                yield Parting(number, "gradients", "ranks", record.world_size, cause, gap.name or only[0],
                              gap.relative or None, SAME * 10)  # fmt: skip
                return


def why_not_reduced(updates: list[Update], rank: int) -> Cause:
    facts = updates[0].facts
    seen = f"Rank 0 and rank {rank} step with different gradients"
    passes = facts["backwards"]
    line = passes[-1]["line"] if passes else facts["line"]
    if not facts["joined"]:
        return Cause(
            "never-joined",
            f"{seen}: the processes never met (torch.distributed is not initialised), each trains a model of its own.",
            "Call torch.distributed.init_process_group and wrap the model, or use instep.Run.",
            facts["line"],
        )
    if not facts["wrapped"]:
        return Cause(
            "not-averaged",
            f"{seen}: no wrapper holds the parameters of the optimizer at {facts['line']}, and nothing else averages "
            "their gradients.",
            "Wrap the model in DistributedDataParallel before the optimizer is made, or average gradients after "
            "backward; instep.Run does it by itself.",
            facts["line"],
        )
    if facts["replaced"]:
        return Cause(
            "parameters-replaced",
            f"{seen}: {facts['replaced']} of the model's parameters are not those that were wrapped at "
            f"{facts['wrap_line']}; new parameters are unknown to the wrapper, which averages the old ones.",
            "Replace layers, convert or move the model before it is wrapped.",
            facts["wrap_line"],
        )
    if not facts["wrapped_forwards"]:
        return Cause(
            "forward-past-wrapper",
            f"{seen}: the loss comes from a forward of the inner model, not of the wrapper made at "
            f"{facts['wrap_line']}; gradients are averaged only after a forward through the wrapper.",
            "Call the wrapped model (model(x), not model.module(x)) for what goes into the loss.",
            line,
        )
    if passes and passes[-1]["synced"] is False:
        order = ", ".join("averaged" if one["synced"] else "no_sync" for one in passes[:8])
        return Cause(
            "no-sync",
            f"{seen}: the last of the {len(passes)} backward passes before the step is under no_sync ({order}), so "
            "what it adds stays local.",
            "Leave no_sync for the last micro-batch of each group: sync when (i + 1) % accumulation == 0.",
            facts.get("no_sync_line", line),
        )
    return Cause(
        "reduction-lost",
        f"{seen}, although the model is wrapped at {facts['wrap_line']} and its forward went through the wrapper.",
        "Look for a change of the model after wrapping (dtype, requires_grad), for gradients computed with "
        "torch.autograd.grad, and for clipping by a rank's own norm before the average.",
        facts["line"],
    )


def mean_of_local(record: Record) -> Iterator[Parting]:
    """The gradients agree between ranks; are they the mean of what the ranks computed?"""
    if record.uses_run:
        return
    for number in range(1, record.num_steps + 1):
        updates = record.step(number)
        facts = updates[0].facts
        if facts["sharded"] or facts.get("hook") or is_split(updates) or not updates[0].vectors["local"]:
            return
        expected = mean([update.vectors["local"] for update in updates])
        reduced = updates[0].vectors["reduced"]
        gap = farthest(expected, reduced, scales(expected))
        fit = fit_factor(expected, reduced)
        if gap.relative <= CLOSE * 10 or fit is None:
            continue
        if fit.rest <= CLOSE:
            yield Parting(number, "gradients", "ranks", record.world_size,
                          why_factor(fit.factor, record.world_size, facts["line"]), gap.name,
                          abs(fit.factor - 1), CLOSE)  # fmt: skip
            return
        cause = _why_no_mean(record, number)
        if cause is not None:
            yield Parting(number, "gradients", "ranks", record.world_size, cause, gap.name, gap.relative, CLOSE * 10)
            return


def why_factor(factor: float, ranks: int, line: str) -> Cause:
    """The averaging itself multiplies by something."""
    seen = f"The gradients that the optimizer uses are {factor:.4g} times the mean of the ranks' own"
    if abs(factor - ranks) < CLOSE * ranks:
        return Cause(
            "gradients-summed",
            f"{seen}: they are added over the {ranks} ranks, not averaged.",
            "Divide by the number of processes after the all-reduce, or use ReduceOp.AVG.",
            line,
        )
    if abs(factor * ranks - 1) < CLOSE:
        return Cause(
            "averaged-twice",
            f"{seen} (1/{ranks}): they are divided by the number of processes twice.",
            "Divide once: DistributedDataParallel and ReduceOp.AVG divide already.",
            line,
        )
    return Cause(
        "constant-factor",
        f"{seen}.",
        "Look for a division or a multiplication of gradients between backward and the optimizer's step.",
        line,
    )


def _why_no_mean(record: Record, number: int) -> Cause | None:
    """Gradients of an earlier step that are still in, the only mixture we can name."""
    if number == 1:
        return None
    rank = record.ranks[0]
    now, before = rank.updates[number - 1], rank.updates[number - 2]
    if now.facts["optimizer"] != before.facts["optimizer"]:
        return None
    expected = mean([update.vectors["local"] for update in record.step(number)])
    left = {name: v - expected[name] for name, v in now.vectors["reduced"].items() if name in expected}
    for kind in ("applied", "reduced"):
        gap = farthest(before.vectors[kind], left, scales(before.vectors[kind]))
        if gap.relative < CLOSE * 10:
            return Cause(
                "gradients-not-cleared",
                "The gradients of the step before are still in those of this one: they were not cleared in between.",
                "Call optimizer.zero_grad() once per step, before the first backward.",
                now.facts["line"],
            )
    return None

"""Whether the ranks hold the same parameters, in the same order, and the same batch-norm statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from instep.verify.parting import Cause, Parting
from instep.verify.records import Record, Update
from instep.verify.vectors import Vectors, farthest, norm

SAME = 1e-6  # relative: what one all-reduce or broadcast hands out is equal, up to a rounding of the script's own


def sizes_of(vectors: Vectors) -> dict[str, float]:
    return {name: norm(vector) for name, vector in vectors.items()}


def is_split(updates: Sequence[Update]) -> bool:
    """Whether ranks rightly hold different things: tensor parallel layers, stages of a pipeline."""
    first = updates[0].facts
    return (
        first["mesh_axes"] > 1
        or first["tensor_parallel"]
        or any(sorted(update.facts["names"]) != sorted(first["names"]) for update in updates)
    )


def averages_parameters(record: Record) -> bool:
    """Whether the script averages parameters over ranks by itself, after steps with gradients of each rank's own."""
    for number in range(2, record.num_steps + 1):
        updates = record.step(number)
        starts = [update.vectors["start"] for update in updates]
        before = [previous_weights(record, place, number) for place in range(len(updates))]
        if not all(starts) or not all(update.facts["changed"] for update in updates):
            continue
        equal_now = all(farthest(starts[0], one, sizes_of(starts[0])).relative <= SAME for one in starts[1:])
        differed = any(farthest(before[0], one, sizes_of(before[0])).relative > SAME for one in before[1:])
        if equal_now and differed:
            return True
    return False


def parameter_order(record: Record) -> Iterator[Parting]:
    facts = record.ranks[0].updates[0].facts
    first = facts["model_names"]
    for rank in record.ranks[1:]:
        names = rank.updates[0].facts["model_names"]
        if names != first and sorted(names) == sorted(first):
            place = next(i for i, (one, other) in enumerate(zip(first, names)) if one != other)
            cause = order_cause(
                first[place], names[place], "on rank 0", f"on rank {rank.number}", facts.get("wrap_line", "")
            )
            yield Parting(1, "parameter order", "ranks", record.world_size, cause, first[place])
            return


def order_cause(one: str, other: str, here: str, there: str, line: str) -> Cause:
    return Cause(
        "parameter-order",
        f"The model has the same parameters in another order: where {one} stands {here}, {other} stands {there}. "
        "The order comes from something that differs between processes, most often a set of names; gradients are "
        "averaged by position, so different parameters are mixed, and initial weights are drawn in another order.",
        "Build the model from a sorted list: sorted(set(names)) instead of set(names).",
        line,
    )


def starting_weights(record: Record) -> Iterator[Parting]:
    """Weights before a step that training has not changed: at the first step of an optimizer, and after a load."""
    for number in range(1, record.num_steps + 1):
        updates = record.step(number)
        starts = [update.vectors["start"] or previous_weights(record, place, number) for place, update in
                  enumerate(updates)]  # fmt: skip
        if not any(update.vectors["start"] for update in updates) or is_split(updates):
            continue
        for place, start in enumerate(starts[1:], 1):
            gap = farthest(starts[0], start, sizes_of(starts[0]))
            if gap.relative > SAME:
                cause = _why_weights_differ(record, place, number)
                yield Parting(number, "weights before the step", "ranks", record.world_size, cause, gap.name,
                              gap.relative, SAME)  # fmt: skip
                return


def previous_weights(record: Record, place: int, number: int) -> Vectors:
    """A rank's parameters after its step before, of the same optimizer."""
    updates = record.ranks[place].updates[: number - 1]
    optimizer = record.ranks[place].updates[number - 1].facts["optimizer"]
    return next((u.vectors["param"] for u in reversed(updates) if u.facts["optimizer"] == optimizer), {})


def _why_weights_differ(record: Record, place: int, number: int) -> Cause:
    loads = [{note["line"] for note in rank.named("load") if note["after"] == number - 1} for rank in record.ranks]
    loaded = [rank.number for rank, lines in zip(record.ranks, loads) if lines]
    other = record.ranks[place].number
    if loaded and len(loaded) < len(record.ranks):
        line = sorted(next(lines for lines in loads if lines))[0]
        return Cause(
            "loaded-on-some-ranks",
            f"load_state_dict at {line} ran on rank {', '.join(map(str, loaded))} only, after the model was wrapped; "
            "wrapping is when ranks get rank 0's weights, so the others go on with their own.",
            "Load on every rank, or before the model is wrapped.",
            line,
        )
    wrapped = record.step(number)[0].facts["wrapped"]
    if number > 1 or wrapped:
        return Cause(
            "weights-changed-outside",
            f"Something other than the optimizer changed the weights, and not equally on rank 0 and rank {other}.",
            "Change weights on every rank in the same way, or before the model is wrapped.",
        )
    return Cause(
        "initial-weights",
        f"Rank {other} begins with other weights than rank 0, and nothing makes them equal: the ranks drew them from "
        "differently seeded generators, and the model is not wrapped in DistributedDataParallel, which would hand out "
        "rank 0's.",
        "Call torch.manual_seed with the same number on every rank before the model is built, or broadcast rank 0's "
        "parameters and buffers once: for t in model.state_dict().values(): dist.broadcast(t, 0).",
    )


def weights_after(record: Record) -> Iterator[Parting]:
    """Parameters after a step, where gradients, weights before and learning rates were equal."""
    for number in range(1, record.num_steps + 1):
        updates = record.step(number)
        if is_split(updates):
            return
        first = updates[0].vectors["param"]
        for update, rank in zip(updates[1:], record.ranks[1:]):
            rates = (updates[0].facts["rates"], update.facts["rates"])
            if rates[0] != rates[1]:
                yield Parting(number, "learning rate", "ranks", record.world_size, Cause(
                    "rates-apart",
                    f"The learning rate is {rates[0]} on rank 0 and {rates[1]} on rank {rank.number}.",
                    "Step schedulers on every rank with the same value; give ReduceLROnPlateau a metric that was "
                    "averaged over ranks.", update.facts.get("scheduler_line", "")))  # fmt: skip
                return
            gap = farthest(first, update.vectors["param"], sizes_of(first))
            if gap.relative > SAME:
                cause = Cause(
                    "optimizer-state",
                    f"Rank {rank.number} has other parameters after the step than rank 0, although gradients and "
                    "learning rates agree: the optimizers hold different state, or clip differently.",
                    "Load the optimizer's state on every rank; clip after gradients are averaged.",
                )
                yield Parting(number, "parameters", "ranks", record.world_size, cause, gap.name, gap.relative, SAME)
                return


def statistics(record: Record) -> Iterator[Parting]:
    """Batch-norm statistics that nothing will ever make equal."""
    for number in range(1, record.num_steps + 1):
        updates = record.step(number)
        facts = updates[0].facts
        names = set(facts["statistics"])
        if not names or (facts["wrapped"] and facts["broadcast_buffers"]) or record.uses_run:
            return
        first = {name: v for name, v in updates[0].vectors["buffer"].items() if name in names}
        for update, rank in zip(updates[1:], record.ranks[1:]):
            gap = farthest(first, update.vectors["buffer"], sizes_of(first))
            if gap.relative > SAME:
                yield Parting(number, "buffers", "ranks", record.world_size, _statistics_cause(facts, rank.number),
                              gap.name, gap.relative, SAME)  # fmt: skip
                return


def _statistics_cause(facts: dict[str, object], rank: int) -> Cause:
    why = (
        "the model is wrapped with broadcast_buffers=False"
        if facts["wrapped"]
        else "nothing hands out rank 0's buffers"
    )
    return Cause(
        "batch-norm-statistics",
        f"Running statistics of batch norm differ between rank 0 and rank {rank}: each rank keeps those of its own "
        f"samples, and {why}. What rank 0 evaluates and saves has seen its part of the data only.",
        "Leave broadcast_buffers at its default, or broadcast the buffers before evaluating and saving, or use "
        "synchronised batch norm.",
        str(facts.get("wrap_line", "")),
    )

"""Whether each rank trains on its own part of the data, in a new order each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from instep.verify.parting import Cause, Parting
from instep.verify.records import Record
from instep.verify.within.weights import is_split


def same_data(record: Record) -> Iterator[Parting]:
    """Two ranks whose samples are equal in every step. A dataset may hold equal samples, so one step proves nothing
    unless its samples differ from each other."""
    if record.num_steps == 0 or is_split(record.step(1)) or record.uses_run:
        return
    for place, rank in enumerate(record.ranks[1:], 1):
        rows = [(Counter(s[0].facts["samples"]), Counter(s[place].facts["samples"])) for s in _steps(record)]
        rows = [(one, other) for one, other in rows if one and other]
        if rows and all(one == other for one, other in rows) and any(len(one) > 1 for one, _ in rows):
            yield Parting(
                1, "samples", "ranks", record.world_size, _why_same(record, rank.number),
                f"rank 0 and rank {rank.number}",
            )  # fmt: skip
            return


def _steps(record: Record) -> list[list[Any]]:
    return [record.step(number) for number in range(1, record.num_steps + 1)]


def _why_same(record: Record, rank: int) -> Cause:
    laps = [lap for each in record.ranks if each.number == rank for lap in each.named("lap")]
    seen = f"Rank 0 and rank {rank} train on the same samples in every step"
    if laps and (laps[0]["rank"] != rank or laps[0]["num_replicas"] != record.world_size):
        lap = laps[0]
        return Cause(
            "same-data",
            f"{seen}: the DistributedSampler of rank {rank} was made with rank={lap['rank']}, "
            f"num_replicas={lap['num_replicas']}. More processes add nothing but cost.",
            "Leave rank and num_replicas out (the process group knows them), or take them from the variables RANK and "
            "WORLD_SIZE; --local_rank is not passed by torchrun.",
            lap["line"],
        )
    loaders = record.ranks[0].named("loader")
    return Cause(
        "same-data",
        f"{seen}: nothing gives each rank a part of its own. More processes add nothing but cost.",
        "Give the DataLoader sampler=DistributedSampler(dataset) instead of shuffle=True, and call "
        "sampler.set_epoch(epoch) before each epoch.",
        loaders[0]["line"] if loaders else "",
    )


def epoch_order(record: Record) -> Iterator[Parting]:
    laps: dict[str, dict[str, Any]] = {}
    for lap in record.ranks[0].named("lap"):
        earlier = laps.get(lap["line"])
        if earlier and _repeats(earlier, lap):
            cause = Cause(
                "epoch-order",
                f"The epoch that began after step {lap['after']} has the same order of samples as the one before: "
                "set_epoch of the DistributedSampler is never called, and it shuffles by its seed and the epoch.",
                "Call sampler.set_epoch(epoch) at the beginning of every epoch.",
                lap["line"],
            )
            yield Parting(max(1, lap["after"]), "samples", "ranks", record.world_size, cause, "the next epoch")
            return
        laps[lap["line"]] = lap


def _repeats(earlier: dict[str, Any], lap: dict[str, Any]) -> bool:
    follows = lap["lap"] == earlier["lap"] + 1 and lap["epoch"] == earlier["epoch"]
    return bool(follows and lap["shuffle"] and not lap["epoch_was_set"])

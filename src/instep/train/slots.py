"""The slots of a step: how a global batch is cut into micro-batches and who runs which."""

from __future__ import annotations

import math
from dataclasses import dataclass

from instep.errors import UsageError
from instep.records.choice import Choice

DEFAULT_SLOTS = 8  # enough for 8 processes, and a step on one process stays a short loop
MORE = "More: instep explain startup/batch-does-not-fit"


@dataclass(frozen=True)
class Slots:
    """A step has `count` slots, numbered from 0; slot m belongs to rank floor(m * world_size / count)."""

    global_batch: int
    micro_batch: int
    rank: int
    world_size: int

    @property
    def count(self) -> int:
        return self.global_batch // self.micro_batch

    @property
    def local(self) -> range:
        """This rank's slots."""
        return self.of(self.rank)

    def of(self, rank: int) -> range:
        # floor(m * N / M) = r  <=>  ceil(r * M / N) <= m < ceil((r + 1) * M / N)
        return range(-(-rank * self.count // self.world_size), -(-(rank + 1) * self.count // self.world_size))

    def owner(self, slot: int) -> int:
        return slot * self.world_size // self.count

    def describe(self) -> str:
        per_rank = sorted({len(self.of(rank)) for rank in range(self.world_size)})
        share = "" if self.world_size == 1 else f", {' or '.join(map(str, per_rank))} per rank"
        word = "micro-batch" if self.count == 1 else "micro-batches"
        return (
            f"global batch {self.global_batch} = {self.count} {word} x {self.micro_batch}{share}; "
            "learning rate untouched"
        )


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def choose_micro_batch(global_batch: int) -> Choice:
    """The micro-batch that follows from the global batch alone, so that no world size changes the numbers."""
    if global_batch % DEFAULT_SLOTS == 0:
        count = DEFAULT_SLOTS
    else:
        count = next((n for n in divisors(global_batch) if n > DEFAULT_SLOTS), global_batch)
    reason = f"{global_batch} samples in {count} slots, whatever the number of processes"
    return Choice("micro_batch", global_batch // count, reason, "Run(micro_batch=...)")


def plan_slots(global_batch: int, micro_batch: int, rank: int, world_size: int) -> Slots:
    """Checks the sizes. Raises UsageError with the values that fit."""
    check_positive("global_batch", global_batch)
    check_positive("micro_batch", micro_batch)
    if global_batch % micro_batch:
        fitting = divisors(global_batch)
        raise UsageError(
            f"micro_batch={micro_batch} does not divide global_batch={global_batch}. "
            f"These do: {_some(fitting, micro_batch)}. {MORE}"
        )
    count = global_batch // micro_batch
    if world_size > count:
        smaller = [n for n in divisors(global_batch) if n <= micro_batch and global_batch // n >= world_size]
        ways = [f"start at most {count} process{'es' if count > 1 else ''}"]
        if smaller:
            ways.append(f"set micro_batch to one of {_some(smaller, micro_batch)}")
        ways.append(f"set global_batch to a multiple of {micro_batch} that is at least {micro_batch * world_size}")
        raise UsageError(
            f"{world_size} ranks cannot share global_batch={global_batch}: with micro_batch={micro_batch} a step has "
            f"{count} micro-batch{'es' if count > 1 else ''}, fewer than ranks. Either {', or '.join(ways)}. {MORE}"
        )
    return Slots(global_batch, micro_batch, rank, world_size)


def check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r} has to be a whole number of at least 1.")


def _some(values: list[int], near: int, most: int = 8) -> str:
    chosen = sorted(sorted(values, key=lambda value: abs(value - near))[:most])
    return ", ".join(map(str, chosen))

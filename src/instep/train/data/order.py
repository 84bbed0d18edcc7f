"""The order of samples in an epoch, a function of (seed, epoch) alone, cut into steps and slots."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from instep.errors import UsageError
from instep.train.data.source import Source, length
from instep.train.seeds import ORDER, get_generators, mix, restore_generators, set_generators
from instep.train.slots import Slots

# They draw everything from one generator when iteration starts, or from one they make there, and they end.
_DRAW_AT_START = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Order(Protocol):
    """positions(step, slot): what the slot's micro-batch is made of; empty when the slot has none in this step."""

    num_steps: int | None

    def has(self, step: int) -> bool: ...
    def slots(self, step: int) -> Sequence[int]:
        """This rank's slots that hold samples in the step."""
        ...

    def positions(self, step: int, slot: int) -> Any: ...


def plan_order(source: Source, slots: Slots, seed: int, epoch: int, first_step: int, spread: bool = False) -> Order:
    """The order of one epoch. Global generators are left as they were.

    spread: a short step gives every slot its share, instead of leaving the later slots empty.
    """
    if source.sampler is None and source.batch_sampler is None:
        return PlannedOrder(_own_order(source, seed, epoch), source, slots, spread)
    sampler: Any = source.batch_sampler if source.sampler is None else source.sampler
    for part in _parts(sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        _seed_own_generators(part, mix(ORDER, seed, epoch))
    if type(sampler) in _DRAW_AT_START:
        with _drawing(ORDER, seed, epoch):
            return PlannedOrder(list(sampler), source, slots, spread)
    order = DrawnOrder(iter(sampler), source, slots, (ORDER, seed, epoch), spread)
    order.skip(first_step)
    return order


def _own_order(source: Source, seed: int, epoch: int) -> torch.Tensor | range:
    count = len(source.dataset)
    if not source.shuffle:
        return range(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(mix(ORDER, seed, epoch)))


def _parts(sampler: Any) -> list[Any]:
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def _seed_own_generators(sampler: Any, seed: int) -> None:
    """Sets the generators that a sampler holds as attributes."""
    numpy = sys.modules.get("numpy")
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Generator):
            value.manual_seed(seed)
        elif isinstance(value, random.Random):
            value.seed(seed)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            value.seed(seed & 0xFFFFFFFF)
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(seed).state


@contextmanager
def _drawing(*numbers: int) -> Iterator[None]:
    before = get_generators()
    set_generators(*numbers)
    try:
        yield
    finally:
        restore_generators(before)


def _share(count: int, slot: int, num_slots: int) -> tuple[int, int]:
    """Where a slot's part of a short step begins and ends. Raises UsageError when not every slot can have one."""
    if count < num_slots:
        raise UsageError(
            f"the last step of the epoch has {count} samples for {num_slots} ranks, and sync_batch_norm=True needs one "
            "on each. Give run.loader drop_last=True, or a dataset that leaves more over."
        )
    return slot * count // num_slots, (slot + 1) * count // num_slots


class PlannedOrder:
    """Every position is known when the epoch starts; step k takes positions [k*B, (k+1)*B)."""

    def __init__(self, positions: Any, source: Source, slots: Slots, spread: bool) -> None:
        # Of a prebatched dataset a slot takes one item, of any other a micro-batch of them.
        self._per_slot = 1 if source.prebatched else slots.micro_batch
        self._per_step = self._per_slot * slots.count
        self._positions = positions
        self._count = len(positions)
        self._local = tuple(slots.local)
        whole, rest = divmod(self._count, self._per_step)
        self._end = whole if source.drop_last or not rest else whole + 1
        self.num_steps: int | None = self._end
        self._short = rest if spread and not source.drop_last and not source.prebatched else 0
        self._num_slots = slots.count
        if self._short:
            _share(self._short, 0, self._num_slots)

    def has(self, step: int) -> bool:
        return step < self._end

    def slots(self, step: int) -> Sequence[int]:
        start = step * self._per_step
        if start + self._per_step <= self._count or (self._short and start < self._count):
            return self._local
        return [slot for slot in self._local if start + slot * self._per_slot < self._count]

    def positions(self, step: int, slot: int) -> Any:
        if self._short and step == self._end - 1:
            first, end = _share(self._short, slot, self._num_slots)
            return self._positions[step * self._per_step + first : step * self._per_step + end]
        start = step * self._per_step + slot * self._per_slot
        return self._positions[start : start + self._per_slot]


class DrawnOrder:
    """A user's sampler, drawn from a step at a time: it may draw as it goes, and need not end.

    The global generators are set for the step while it draws, so that its draws do not depend on what ran before.
    """

    def __init__(
        self, drawn: Iterator[Any], source: Source, slots: Slots, numbers: tuple[int, ...], spread: bool
    ) -> None:
        self._drawn = drawn
        self._numbers = numbers
        self._is_batches = source.batch_sampler is not None
        self._micro_batch = slots.micro_batch
        self._per_slot = 1 if source.prebatched or self._is_batches else slots.micro_batch
        self._per_step = self._per_slot * slots.count
        self._drop_last = source.drop_last and not self._is_batches
        self._spread = spread and self._per_slot > 1
        self._num_slots = slots.count
        self._local = tuple(slots.local)
        self._steps: dict[int, list[Any]] = {}
        self._next = 0
        count = length(source.batch_sampler if self._is_batches else source.sampler)
        self.num_steps: int | None = None
        if count is not None:
            self.num_steps = count // self._per_step if self._drop_last else -(-count // self._per_step)

    def has(self, step: int) -> bool:
        return bool(self._at(step))

    def slots(self, step: int) -> Sequence[int]:
        # The loader reads the steps in order and asks for the slots of each once: what lies behind is not needed.
        for old in [old for old in self._steps if old < step]:
            del self._steps[old]
        return [slot for slot in self._local if self.positions(step, slot)]

    def positions(self, step: int, slot: int) -> Any:
        whole = self._at(step)
        if self._spread and 0 < len(whole) < self._per_step:
            first, end = _share(len(whole), slot, self._num_slots)
            return whole[first:end]
        drawn = whole[slot * self._per_slot : (slot + 1) * self._per_slot]
        return self._checked(drawn) if self._is_batches else drawn

    def skip(self, num_steps: int) -> None:
        for step in range(num_steps):
            self._at(step)
            self._steps.clear()

    def _at(self, step: int) -> list[Any]:
        while self._next <= step:
            with _drawing(*self._numbers, self._next):
                drawn = list(itertools.islice(self._drawn, self._per_step))
            if self._drop_last and len(drawn) < self._per_step:
                drawn = []
            self._steps[self._next] = drawn
            self._next += 1
        return self._steps[step]

    def _checked(self, batches: list[Any]) -> Any:
        if not batches:
            return batches
        batch = batches[0]
        if len(batch) > self._micro_batch:
            raise UsageError(
                f"the batch sampler gave a batch of {len(batch)} samples, but micro_batch={self._micro_batch}: one of "
                f"its batches is one micro-batch. Set micro_batch={len(batch)} in Run, or let it give smaller batches."
            )
        return batch

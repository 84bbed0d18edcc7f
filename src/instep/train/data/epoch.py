"""One epoch of a loader: its steps, and the micro-batches of each, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from instep.train.data.feed import Feed
from instep.train.data.to_device import DeviceCopy


@dataclass(slots=True)
class MicroBatch:
    """slot: its place in the step; num_samples: how many it has; data: collated, on the device."""

    slot: int
    num_samples: int
    data: Any


class Epoch:
    """Gives one step after the other to this rank. `num_steps` is None when only the end of the data will tell."""

    def __init__(self, feed: Feed, first_step: int, copier: DeviceCopy) -> None:
        self.num_steps = feed.num_steps
        self._feed = feed
        self._next = first_step
        self._fetched = FetchAhead(feed, copier) if copier.is_ahead else FetchNow(feed, copier)

    def has_next(self) -> bool:
        """Whether this rank holds a sample of the next step. Of map-style data: whether any rank does."""
        return self._feed.has(self._next)

    def next_step(self) -> StepBatches:
        """This rank's micro-batches of the next step; none of them when its streams have ended before others'."""
        step = self._next
        self._next = step + 1
        return StepBatches(self._fetched, step, self._feed.slots(step))

    def stream_states(self) -> dict[int, Any] | None:
        """By slot, what an iterable dataset's stream needs to go on after the steps handed out; None if map-style."""
        return self._feed.states(self._next)

    def close(self) -> None:
        """Gives up what the epoch holds, its worker processes if they are not kept for the next one."""
        self._fetched.close()
        self._feed.close()


class StepBatches:
    """A step's micro-batches. They are fetched when iterated over, and kept to be iterated over again."""

    __slots__ = ("_fetched", "_kept", "_slots", "_step")

    def __init__(self, fetched: FetchNow | FetchAhead, step: int, slots: Sequence[int]) -> None:
        self._fetched = fetched
        self._step = step
        self._slots = slots
        self._kept: list[MicroBatch] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[MicroBatch]:
        kept = self._kept
        for position, slot in enumerate(self._slots):
            if position == len(kept):
                kept.append(self._fetched.get(self._step, slot, self._slots))
            yield kept[position]


class FetchNow:
    """Fetches a micro-batch when it is wanted."""

    def __init__(self, feed: Feed, copier: DeviceCopy) -> None:
        self._fetch = feed.fetch
        self._move = copier.move

    def get(self, step: int, slot: int, slots: Sequence[int]) -> MicroBatch:
        count, data = self._fetch(step, slot)
        return MicroBatch(slot, count, self._move(data))

    def close(self) -> None:
        pass


class FetchAhead:
    """Starts to copy a micro-batch to the device while the one before it is being computed."""

    def __init__(self, feed: Feed, copier: DeviceCopy) -> None:
        self._feed = feed
        self._copier = copier
        self._ahead: tuple[tuple[int, int], int, Any, Any] | None = None

    def get(self, step: int, slot: int, slots: Sequence[int]) -> MicroBatch:
        ahead = self._ahead
        if ahead is None or ahead[0] != (step, slot):  # the first, or the one before was passed over
            ahead = self._begin(step, slot)
        # Started before this micro-batch's computation is queued, so that it runs beside it.
        following = self._following(step, slot, slots)
        self._ahead = None if following is None else self._begin(*following)
        _, count, moved, event = ahead
        return MicroBatch(slot, count, self._copier.finish(moved, event))

    def close(self) -> None:
        self._ahead = None

    def _begin(self, step: int, slot: int) -> tuple[tuple[int, int], int, Any, Any]:
        count, data = self._feed.fetch(step, slot)
        return (step, slot), count, *self._copier.begin(data)

    def _following(self, step: int, slot: int, slots: Sequence[int]) -> tuple[int, int] | None:
        later = [other for other in slots if other > slot]
        if later:
            return step, later[0]
        if self._feed.may_run_ahead and self._feed.has(step + 1):
            following = self._feed.slots(step + 1)
            return (step + 1, following[0]) if following else None
        return None

"""Micro-batches of one epoch, in order, read in this process. `worker_feed.py` has the same in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from instep.train.data.order import Order
from instep.train.data.streams import StreamSet
from instep.train.seeds import DATA, set_generators
from instep.train.slots import Slots


class Feed(Protocol):
    """Steps are asked for in order: `slots` of a step, then `fetch` of some of these slots, in order; `has` of the next
    step may be asked before or after that."""

    num_steps: int | None
    may_run_ahead: bool  # whether a step may be fetched from before the one before it has been trained on

    def has(self, step: int) -> bool: ...
    def slots(self, step: int) -> Sequence[int]:
        """This rank's slots that hold samples. Steps before the one before it may not be fetched any more."""
        ...

    def fetch(self, step: int, slot: int) -> tuple[int, Any]:
        """Samples in the micro-batch, and its data on the host."""
        ...

    def states(self, step: int) -> dict[int, Any] | None:
        """What an iterable dataset needs to go on before the step, by slot; None where the step is enough."""
        ...

    def close(self) -> None: ...


class IndexedFeed:
    """Reads a map-style dataset by position."""

    may_run_ahead = True

    def __init__(self, order: Order, fetch: Any, seed: int, epoch: int) -> None:
        self.num_steps = order.num_steps
        self.has = order.has
        self.slots = order.slots
        self._positions = order.positions
        self._fetch: Callable[[Any], tuple[int, Any]] = fetch
        self._draws: bool = fetch.draws
        self._numbers = (DATA, seed, epoch)

    def fetch(self, step: int, slot: int) -> tuple[int, Any]:
        if self._draws:
            set_generators(*self._numbers, step, slot)
        return self._fetch(self._positions(step, slot))

    def states(self, step: int) -> None:
        return None

    def close(self) -> None:
        pass


class StreamFeed:
    """Reads the virtual streams of this rank's slots."""

    num_steps: int | None = None
    may_run_ahead = False  # what comes next may depend on what is learnt now

    def __init__(self, streams: StreamSet, slots: Slots, first_step: int, on_open: Callable[[bool], None]) -> None:
        """on_open: told, when the first sample has been read, whether the dataset has to be strided."""
        self._streams = streams
        self._local = tuple(slots.local)
        self._step = first_step - 1  # the last step that was looked into
        self._nonempty: list[int] = []
        self._unread: list[int] = []
        self._read: dict[tuple[int, int], tuple[int, Any]] = {}  # not yet asked for
        self._on_open: Callable[[bool], None] | None = on_open

    def has(self, step: int) -> bool:
        return bool(self.slots(step))

    def slots(self, step: int) -> Sequence[int]:
        if self._step != step:
            self._read_up()
            self._step = step
            self._nonempty = [slot for slot in self._local if self._streams.peek(step, slot)]
            self._unread = list(self._nonempty)
            if self._on_open is not None:
                self._on_open(self._streams.is_strided)
                self._on_open = None
        return self._nonempty

    def fetch(self, step: int, slot: int) -> tuple[int, Any]:
        if (step, slot) in self._read:
            return self._read.pop((step, slot))
        self._unread.remove(slot)
        return self._streams.take(step, slot)

    def states(self, step: int) -> dict[int, Any]:
        if self._step < step:
            self._read_up()
        return {slot: self._streams.state(slot, step) for slot in self._local}

    def close(self) -> None:
        self._unread = []
        self._read.clear()

    def _read_up(self) -> None:
        """Reads what is left of the last step, which may yet be asked for, so that its streams can go on."""
        self._read = {(self._step, slot): self._streams.take(self._step, slot) for slot in self._unread}
        self._unread = []

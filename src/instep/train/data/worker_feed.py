"""Micro-batches read by worker processes.

A task says which micro-batch is wanted, so that generators can be set for it in whichever process reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from instep.errors import UsageError
from instep.train.data.order import Order
from instep.train.data.stream_reader import StreamPlan
from instep.train.data.streams import StreamSet
from instep.train.data.worker_service import Failure, Service
from instep.train.seeds import DATA, set_generators


class IndexedReader(Dataset[Any]):
    """In a worker: reads the micro-batch at given positions."""

    def __init__(self, dataset: Any, fetch: Any, seed: int) -> None:
        self.dataset = dataset
        self._fetch = fetch
        self._seed = seed
        self._epoch: int | None = None

    def __getitem__(self, task: tuple[int, int, int, Any]) -> Any:
        epoch, step, slot, positions = task
        if self._epoch != epoch:
            self._epoch = epoch
            if hasattr(self.dataset, "set_epoch"):  # a kept worker does not see what happens in the main process
                self.dataset.set_epoch(epoch)
        set_generators(DATA, self._seed, epoch, step, slot)
        try:
            return step, slot, *self._fetch(positions)
        except UsageError as error:
            return Failure(str(error))


class IndexedTasks:
    """The micro-batches to read, from a step on. `step` follows the training: what it has left behind is not read."""

    def __init__(self, order: Order, local: Sequence[int], epoch: int, step: int) -> None:
        self.step = step
        self._order = order
        self._local = tuple(local)
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int, int, Any]]:
        step = self.step
        while self._order.has(step):
            for slot in self._local:
                if step < self.step:
                    break
                positions = self._order.positions(step, slot)
                if len(positions):
                    if isinstance(positions, torch.Tensor):  # a tensor would travel as a file of shared memory
                        positions = positions.tolist()
                    yield self._epoch, step, slot, positions
            step = max(step + 1, self.step)


class IndexedWorkerFeed:
    """A map-style dataset, read by worker processes."""

    may_run_ahead = True

    def __init__(self, service: Service, order: Order, local: Sequence[int], epoch: int, first_step: int) -> None:
        self.num_steps = order.num_steps
        self.has = order.has
        self._slots = order.slots
        self._tasks = IndexedTasks(order, local, epoch, first_step)
        self._results = service.start(iter(self._tasks))

    def slots(self, step: int) -> Sequence[int]:
        self._tasks.step = step
        return self._slots(step)

    def fetch(self, step: int, slot: int) -> tuple[int, Any]:
        while True:
            got_step, got_slot, count, data = self._results.next()
            if (got_step, got_slot) == (step, slot):  # else of a micro-batch that was passed over
                return count, data

    def states(self, step: int) -> None:
        return None

    def close(self) -> None:
        self._results.close()


@dataclass(frozen=True)
class StreamStart:
    """The first task of a worker in an epoch brings this along. slots: those that this worker reads."""

    epoch: int
    first_step: int
    slots: tuple[int, ...]
    states: dict[int, Any] | None


@dataclass(frozen=True)
class StreamTask:
    """worker: who holds the slot's stream; slot is None where a worker has nothing to do in this round."""

    worker: int
    step: int
    slot: int | None
    start: StreamStart | None


@dataclass(frozen=True)
class StreamNote:
    """state: of the stream after the micro-batch; resume_seconds: what going to the first step took by reading."""

    state: Any
    is_strided: bool
    resume_seconds: float = 0.0


class StreamsReader(Dataset[Any]):
    """In a worker: holds the streams of some slots over an epoch."""

    def __init__(self, dataset: Any, plan: StreamPlan, collate_fn: Any) -> None:
        self.dataset = dataset
        self._plan = plan
        self._collate_fn = collate_fn
        self._streams: StreamSet | None = None

    def __getitem__(self, task: StreamTask) -> Any:
        info = get_worker_info()
        assert info is None or info.id == task.worker, "torch's DataLoader no longer deals tasks out in turn"
        seconds = 0.0
        if task.start is not None:
            seconds = self._begin(task.start)
        if task.slot is None:
            return task.step, None, 0, None, None
        assert self._streams is not None
        try:
            count, data = self._streams.take(task.step, task.slot)
        except UsageError as error:
            return Failure(str(error))
        state = self._streams.state(task.slot, task.step + 1)
        return task.step, task.slot, count, data, StreamNote(state, self._streams.is_strided, seconds)

    def _begin(self, start: StreamStart) -> float:
        began = time.monotonic()
        self._streams = StreamSet(self.dataset, self._plan, start.slots, start.epoch, self._collate_fn)
        return time.monotonic() - began if self._streams.resume(start.first_step, start.states) else 0.0


class StreamWorkerFeed:
    """The virtual streams of this rank's slots, each held by one worker process."""

    may_run_ahead = True
    num_steps: int | None = None

    def __init__(
        self,
        service: Service,
        local: Sequence[int],
        epoch: int,
        first_step: int,
        states: dict[int, Any] | None,
        on_note: Callable[[bool, float], None],
    ) -> None:
        self._local = tuple(local)
        self._on_note = on_note
        self._step = first_step - 1
        self._ready: dict[int, dict[int, tuple[int, Any] | None]] = {}  # by step and slot, of the last two steps
        self._states: dict[int, dict[int, Any]] = {first_step: {slot: (states or {}).get(slot) for slot in local}}
        self._has_ended = False
        tasks = _stream_tasks(self._local, service.num_workers, epoch, first_step, states)
        self._results = service.start(tasks)

    def has(self, step: int) -> bool:
        return bool(self.slots(step))

    def slots(self, step: int) -> Sequence[int]:
        while self._step < step and not self._has_ended:
            self._receive(self._step + 1)
        return sorted(self._ready.get(step, ()))

    def fetch(self, step: int, slot: int) -> tuple[int, Any]:
        result = self._ready[step][slot]
        assert result is not None, "a micro-batch is fetched once"
        self._ready[step][slot] = None  # what is trained on need not be kept here
        return result

    def states(self, step: int) -> dict[int, Any]:
        return self._states[min(step, max(self._states))]

    def close(self) -> None:
        self._results.close()

    def _receive(self, step: int) -> None:
        self._step = step
        ready: dict[int, tuple[int, Any] | None] = {}
        states: dict[int, Any] = {}
        while len(states) < len(self._local):
            _, slot, count, data, note = self._results.next()
            if slot is not None:
                states[slot] = note.state
                self._on_note(note.is_strided, note.resume_seconds)
                if count:
                    ready[slot] = count, data
        self._ready = {step - 1: self._ready.get(step - 1, {}), step: ready}
        self._has_ended = not ready
        self._states = {step: self._states[step], step + 1: states}


def _stream_tasks(
    local: tuple[int, ...], num_workers: int, epoch: int, first_step: int, states: dict[int, Any] | None
) -> Iterator[StreamTask]:
    """Rounds of one task for each worker, since torch's DataLoader deals tasks out in turn: slot j is read by worker
    j mod num_workers in every step."""
    step = first_step
    starts: dict[int, StreamStart] = {}
    for worker in range(num_workers):
        mine = local[worker::num_workers]
        known = {slot: state for slot, state in (states or {}).items() if slot in mine}
        starts[worker] = StreamStart(epoch, first_step, mine, known)
    while True:
        for first in range(0, len(local), num_workers):
            for worker in range(num_workers):
                slot = local[first + worker] if first + worker < len(local) else None
                yield StreamTask(worker, step, slot, starts.pop(worker, None))
        step += 1

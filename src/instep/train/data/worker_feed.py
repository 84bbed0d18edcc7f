"""Micro-batches read by worker processes: torch's DataLoader carries our tasks and results.

A task says which micro-batch is wanted, so that generators can be set for it in whichever process reads it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from instep.errors import UsageError
from instep.train.data.order import Order
from instep.train.data.source import WorkerOptions
from instep.train.data.stream_reader import StreamPlan
from instep.train.data.streams import StreamSet
from instep.train.data.torch_worker import show_dataset, stop_workers
from instep.train.seeds import DATA, mix, set_generators


def _as_it_is(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Failure:
    """A UsageError on its way back; torch would bring it as a traceback."""

    text: str


class WorkerStart:
    """Runs once in each worker process."""

    def __init__(self, reader: Any, then: Callable[[int], None] | None) -> None:
        self._reader = reader
        self._then = then

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        reader: Any = self._reader if info is None else info.dataset  # under spawn these are two copies
        show_dataset(reader.dataset)
        if self._then is not None:
            self._then(worker_id)


class Tasks:
    """The DataLoader's sampler: the tasks of the epoch that begins."""

    def __init__(self) -> None:
        self.tasks: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.tasks


class Results:
    """What the workers send back in one epoch, in the order of the tasks."""

    def __init__(self, results: Iterator[Any], keeps_workers: bool) -> None:
        self._results: Any = results
        self._keeps_workers = keeps_workers

    @property
    def is_open(self) -> bool:
        return self._results is not None

    def next(self) -> tuple[Any, ...]:
        result = next(self._results)
        if isinstance(result, Failure):
            raise UsageError(result.text)
        return result

    def close(self) -> None:
        if self._results is not None and not self._keeps_workers:
            stop_workers(self._results)
        self._results = None


class Service:
    """The worker processes of a loader, which answer tasks; kept between epochs unless that was refused."""

    def __init__(self, reader: Any, options: WorkerOptions, num_workers: int, pin: bool, seed: int) -> None:
        self.num_workers = num_workers
        self._reader = reader
        self._options = options
        self._pin = pin
        self._seed = seed
        self._kept: DataLoader[Any] | None = None
        self._last: weakref.ref[Results] | None = None

    def start(self, tasks: Iterator[Any]) -> Results:
        last = self._last and self._last()
        keeps = self._options.persistent_workers is not False and not (last is not None and last.is_open)
        served = self._kept if keeps and self._kept is not None else self._make(keeps)
        sampler: Any = served.sampler
        sampler.tasks = tasks
        results = Results(iter(served), keeps)
        if keeps:
            self._kept, self._last = served, weakref.ref(results)
        return results

    def close(self) -> None:
        if self._kept is not None:
            stop_workers(self._kept._iterator)
            self._kept = None

    def _make(self, keeps: bool) -> DataLoader[Any]:
        options = self._options
        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=Tasks(),
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=self._pin,
            timeout=options.timeout,
            worker_init_fn=WorkerStart(self._reader, options.worker_init_fn),
            multiprocessing_context=options.multiprocessing_context,
            generator=torch.Generator().manual_seed(mix(DATA, self._seed)),  # else it would draw from the global one
            prefetch_factor=options.prefetch_factor,
            persistent_workers=keeps,
        )


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

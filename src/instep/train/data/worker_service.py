"""Worker processes that answer tasks: torch's DataLoader starts them and carries tasks and results, in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from instep.errors import UsageError
from instep.train.data.source import WorkerOptions
from instep.train.data.torch_worker import show_dataset, stop_kept_workers, stop_workers
from instep.train.seeds import DATA, mix


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
            stop_kept_workers(self._kept)
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

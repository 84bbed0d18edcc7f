"""What `torch.utils.data.get_worker_info()` answers, and ends of workers: all that is private of torch's data loading.

torch keeps the answer in a module variable, which its worker processes set. A virtual stream sets it to its own while
its dataset runs. Should a later torch keep it elsewhere, `can_show()` is false: iterable datasets are then strided and
read in the main process, which gives every sample once all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.data
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as _worker


class ShownWorker:
    """Stands in for torch's WorkerInfo, and notes whether anyone asked which part of the data is wanted."""

    def __init__(self, id: int, num_workers: int, base_seed: int, dataset: Any) -> None:
        self._id = id
        self._num_workers = num_workers
        self.seed = (base_seed + id) & ((1 << 63) - 1)  # as torch: the seeds of workers differ by their ids
        self.dataset = dataset
        self.rng = None
        self.worker_method = "multiprocessing"
        self.was_asked = False

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._id

    @property
    def num_workers(self) -> int:
        self.was_asked = True
        return self._num_workers

    def show_all(self) -> None:
        """From now on the whole data is wanted, as of the only worker."""
        self._id, self._num_workers = 0, 1


@contextmanager
def showing(info: ShownWorker) -> Iterator[None]:
    before = getattr(_worker, "_worker_info", None)
    _worker._worker_info = info  # type: ignore[assignment]
    try:
        yield
    finally:
        _worker._worker_info = before


def can_show() -> bool:
    probe = ShownWorker(0, 1, 0, None)
    with showing(probe):
        return torch.utils.data.get_worker_info() is probe


def show_dataset(dataset: Any) -> None:
    """In a worker process: `get_worker_info().dataset` is the user's dataset, not our wrapper around it."""
    info = torch.utils.data.get_worker_info()
    if info is None or not can_show():
        return
    shown = ShownWorker(info.id, info.num_workers, info.seed - info.id, dataset)
    _worker._worker_info = shown  # type: ignore[assignment]


def stop_kept_workers(served: DataLoader[Any]) -> None:
    """Ends the processes that a DataLoader keeps between epochs."""
    stop_workers(getattr(served, "_iterator", None))


def stop_workers(iterator: Any) -> None:
    """Ends the processes of a DataLoader's iterator now, where torch offers it, and not when it is collected."""
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is not None:
        stop()

"""How many worker processes read the data, when the user does not say: measured, and none while none pays."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from instep.records.choice import Choice
from instep.train.data.feed import Feed

MEASURED_STEPS = 16  # after one to warm up
LEAST_SHARE = 0.1  # of a step; less is not worth a process
LEAST_SECONDS = 0.001  # a micro-batch; the way through a worker costs some 0.2 ms itself
MOST_WORKERS = 8
OVERRIDE = "run.loader(num_workers=...)"


def spare_cores(local_size: int, device: torch.device) -> int:
    """Cores that one rank may give to workers. On the CPU the computation itself wants two at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, cores // local_size - (2 if device.type == "cpu" else 1))


def choose_without_measuring(in_memory: bool, spare: int) -> Choice | None:
    """No workers, where that is plain from the start; else None."""
    if in_memory:
        return _no_workers("the data are tensors in memory, which no other process reads faster")
    return _no_workers("the ranks of this machine leave no core to spare") if spare < 1 else None


def choose_num_workers(fetch_seconds: float, step_seconds: float, micro_batches: int, spare: int) -> Choice:
    """From the time that a step and the fetching in it took."""
    share = fetch_seconds / step_seconds
    each = fetch_seconds / max(1, micro_batches)
    took = f"fetching took {share:.0%} of a step ({each * 1e3:.2g} ms a micro-batch, over {MEASURED_STEPS} steps)"
    if share < LEAST_SHARE or each < LEAST_SECONDS:
        return _no_workers(took)
    rest = max(step_seconds - fetch_seconds, 1e-9)
    number = min(spare, MOST_WORKERS, math.ceil(fetch_seconds / rest))
    return Choice("num_workers", number, f"{took}, {spare} cores to spare", OVERRIDE)


def check_sendable(choice: Choice, dataset: Any) -> Choice:
    """The choice, or no workers after all for a dataset that they cannot have. Costs a walk over the dataset."""
    why = find_unsendable(dataset) if choice.value else None
    if why is None:
        return choice
    return _no_workers(f"{choice.reason}, but the dataset cannot be copied to other processes ({why})")


def _no_workers(reason: str) -> Choice:
    return Choice("num_workers", 0, reason, OVERRIDE)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _Sendable(pickle.Pickler):
    """Finds what cannot be sent, without copying the data itself."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor | str | bytes) or type(obj).__module__ == "numpy":
            return 0
        if isinstance(obj, types.FunctionType) and multiprocessing.get_start_method(allow_none=True) in (None, "fork"):
            return 0  # a fork has it already
        return None


def find_unsendable(dataset: Any) -> str | None:
    """Why workers cannot have the dataset: open files and connections, above all, do not survive being shared."""
    try:
        _Sendable(_Nowhere()).dump(dataset)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        return str(error)
    return None


class MeasuringFeed:
    """Reads in this process and measures it; then goes on with workers if that pays. The samples are the same."""

    may_run_ahead = True

    def __init__(self, feed: Feed, spare: int, decide: Callable[[Choice, int], Feed | None]) -> None:
        """decide: told the choice and the step that comes next, gives the feed to go on with."""
        self.num_steps = feed.num_steps
        self.has = feed.has
        self._feed = feed
        self._spare = spare
        self._decide: Callable[[Choice, int], Feed | None] | None = decide
        self._first: int | None = None
        self._began = 0.0
        self._fetching = 0.0
        self._fetched = 0

    def slots(self, step: int) -> Sequence[int]:
        if self._decide is not None:
            self._measure(step, self._decide)
        return self._feed.slots(step)

    def fetch(self, step: int, slot: int) -> tuple[int, Any]:
        if self._decide is None:
            return self._feed.fetch(step, slot)
        began = time.perf_counter()
        result = self._feed.fetch(step, slot)
        self._fetching += time.perf_counter() - began
        self._fetched += 1
        return result

    def states(self, step: int) -> dict[int, Any] | None:
        return self._feed.states(step)

    def close(self) -> None:
        self._feed.close()

    def _measure(self, step: int, decide: Callable[[Choice, int], Feed | None]) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = step
        if step <= self._first + 1:
            self._began, self._fetching, self._fetched = now, 0.0, 0
        elif step > self._first + MEASURED_STEPS:
            self._decide = None
            choice = choose_num_workers(self._fetching, now - self._began, self._fetched, self._spare)
            self._feed = decide(choice, step) or self._feed

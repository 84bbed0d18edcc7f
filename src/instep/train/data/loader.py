"""`run.loader`: any dataset, iterable or DataLoader as steps that are the same for every number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from instep.errors import UsageError
from instep.records.choice import Choice
from instep.train.agree import describe_data
from instep.train.call_arguments import read_flag, show
from instep.train.data.epoch import Epoch, MicroBatch, StepBatches
from instep.train.data.feed import Feed, IndexedFeed, StreamFeed
from instep.train.data.fetch import TensorFetch, choose_fetch
from instep.train.data.order import Order, plan_order
from instep.train.data.source import Source, WorkerOptions, check_size, num_samples, read_source
from instep.train.data.source import length as _length
from instep.train.data.stream_reader import StreamPlan
from instep.train.data.streams import StreamSet
from instep.train.data.to_device import DeviceCopy
from instep.train.data.torch_worker import can_show
from instep.train.data.worker_feed import IndexedReader, IndexedWorkerFeed, StreamsReader, StreamWorkerFeed
from instep.train.data.worker_service import Service
from instep.train.data.workers import MeasuringFeed, check_sendable, choose_without_measuring, spare_cores
from instep.train.slots import Slots

__all__ = ["Epoch", "Loader", "MicroBatch", "StepBatches", "build_loader"]

SLOW_RESUME_SECONDS = 2.0  # a wait that one asks oneself about


OPTIONS = (
    "shuffle", "drop_last", "collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor",
    "worker_init_fn", "multiprocessing_context",
)  # fmt: skip
INSTEAD = {
    "batch_size": "Samples per forward pass are Run(micro_batch=...), samples per step Run(global_batch=...).",
    "sampler": "Give it to a DataLoader, and that to run.loader: run.loader(DataLoader(data, micro_batch, sampler=...)).",
    "batch_sampler": "Give it to a DataLoader, and that to run.loader: run.loader(DataLoader(data, batch_sampler=...)).",
    "generator": "The order follows from Run(seed=...) and the epoch.",
    "timeout": "Give it to a DataLoader, and that to run.loader.",
}


def build_loader(
    source: Any,
    *,
    slots: Slots,
    seed: int,
    device: torch.device,
    local_size: int,
    shuffle: bool | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[Any], Any] | None = None,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool | None = None,
    prefetch_factor: int | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    say: Callable[[str], None],
    **unknown: Any,
) -> Loader:
    """source: a map-style dataset, an iterable one, or a DataLoader, of which everything set there is kept.

    Raises UsageError for data that cannot make a single step.
    """
    if isinstance(source, Loader):
        raise UsageError("run.loader was given what run.loader has returned. Use that itself, or give the dataset.")
    for name in unknown:
        raise UsageError(f"run.loader has no {name}=. {INSTEAD.get(name, 'Allowed: ' + ', '.join(OPTIONS) + '.')}")
    for name, value in {
        "shuffle": shuffle, "drop_last": drop_last, "pin_memory": pin_memory, "persistent_workers": persistent_workers
    }.items():  # fmt: skip
        if value is not None:
            read_flag("run.loader", name, value)
    for name, value in {"collate_fn": collate_fn, "worker_init_fn": worker_init_fn}.items():
        if value is not None and not callable(value):
            raise UsageError(f"run.loader({name}={show(value)}): {name} is a function, or left out.")
    workers = WorkerOptions(
        num_workers, pin_memory, persistent_workers, prefetch_factor, worker_init_fn, multiprocessing_context
    )
    read = read_source(source, slots, say, shuffle=shuffle, drop_last=drop_last, collate_fn=collate_fn, workers=workers)
    return Loader(read, slots, seed, device, local_size, say)


class Loader:
    """Data for `run.steps` and `run.evaluate`. `len()` is the number of steps of an epoch."""

    def __init__(
        self,
        source: Source,
        slots: Slots,
        seed: int,
        device: torch.device,
        local_size: int,
        say: Callable[[str], None],
    ) -> None:
        self.dataset = source.dataset
        self._source = source
        self._slots = slots
        self._seed = seed
        self._say = say
        self._copier = DeviceCopy(device)
        self._local_size = local_size
        self._pin = device.type == "cuda" and source.workers.pin_memory is not False
        self._fetch = None if source.is_stream else choose_fetch(source, slots.micro_batch)
        self._service: Service | None = None
        self._said: set[str] = set()
        self._spare = 0
        self.num_workers: int | None = self._settle_workers()
        if isinstance(self._fetch, TensorFetch):
            self._fetch.pinned = self._pin and not self.num_workers

    def __len__(self) -> int:
        source = self._source
        if source.is_stream:
            raise TypeError(
                f"len() of this loader is unknown: {type(self.dataset).__name__} is iterable, and an epoch ends when "
                "its streams have ended. Count steps instead: run.steps(loader, steps=...)."
            )
        count = num_samples(source)
        per_step = self._slots.count if source.prebatched else self._slots.global_batch
        if source.batch_sampler is not None:
            count, per_step = _length(source.batch_sampler), self._slots.count
        if count is None:
            raise TypeError(
                "len() of this loader is unknown: its sampler has no length. Count steps instead: "
                "run.steps(loader, steps=...)."
            )
        return count // per_step if source.drop_last and source.batch_sampler is None else -(-count // per_step)

    def describe(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        source = self._source
        kept = source.sampler if source.batch_sampler is None else source.batch_sampler
        found = {"shuffle": source.shuffle, "drop_last": source.drop_last, **describe_data(self.dataset)}
        if kept is not None:
            found["sampler"] = type(kept).__name__
        return found if source.is_stream else {"samples": num_samples(source), **found}

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "a loader of instep is read through run.steps(loader, epochs=...) or run.evaluate(loader), which keep the "
            "ranks in step; it cannot be iterated over by itself."
        )

    def start_epoch(
        self, epoch: int, first_step: int = 0, streams: dict[int, Any] | None = None, *, spread: bool = False
    ) -> Epoch:
        """Begins an epoch at a step of it. streams: what `Epoch.stream_states` gave before that step, by slot.

        spread: a short last step gives every slot a share of it (of map-style data), and none is left empty.
        """
        if self._source.is_stream:
            feed = self._start_streams(epoch, first_step, streams)
        else:
            feed = self._start_indexed(epoch, first_step, spread)
        return Epoch(feed, first_step, self._copier)

    def close(self) -> None:
        """Ends worker processes that are kept between epochs."""
        if self._service is not None:
            self._service.close()

    def _settle_workers(self) -> int | None:
        """The number of worker processes; None while it has yet to be measured."""
        wanted = self._source.workers.num_workers
        if wanted is None and self._source.is_stream:
            return 0
        if wanted is None:
            self._spare = spare_cores(self._local_size, self._copier.device)
            choice = choose_without_measuring(isinstance(self._fetch, TensorFetch), self._spare)
            if choice is None:
                return None
            self._say(str(choice))
            return 0
        if self._source.is_stream and wanted:
            return min(wanted, len(self._slots.local)) if can_show() else 0
        return wanted

    def _start_indexed(self, epoch: int, first_step: int, spread: bool) -> Feed:
        check_size(self._source, self._slots)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        order = plan_order(self._source, self._slots, self._seed, epoch, first_step, spread)
        if self.num_workers:
            return self._indexed_workers(order, epoch, first_step, self.num_workers)
        feed = IndexedFeed(order, self._fetch, self._seed, epoch)
        if self.num_workers == 0:
            return feed
        return MeasuringFeed(feed, self._spare, lambda choice, step: self._decide(choice, order, epoch, step))

    def _decide(self, choice: Choice, order: Order, epoch: int, step: int) -> Feed | None:
        choice = check_sendable(choice, self.dataset)
        self._say(str(choice))
        assert isinstance(choice.value, int)
        self.num_workers = choice.value
        return self._indexed_workers(order, epoch, step, choice.value) if choice.value else None

    def _indexed_workers(self, order: Order, epoch: int, first_step: int, num_workers: int) -> Feed:
        if self._service is None:
            self._service = self._serve(IndexedReader(self.dataset, self._fetch, self._seed), num_workers)
        return IndexedWorkerFeed(self._service, order, self._slots.local, epoch, first_step)

    def _start_streams(self, epoch: int, first_step: int, states: dict[int, Any] | None) -> Feed:
        source, local = self._source, self._slots.local
        plan = StreamPlan(self._slots.count, self._slots.micro_batch, self._seed, source.drop_last, source.prebatched)
        if self.num_workers:
            if self._service is None:
                reader = StreamsReader(self.dataset, plan, source.collate_fn)
                self._service = self._serve(reader, self.num_workers)
            return StreamWorkerFeed(self._service, local, epoch, first_step, states, self._note_stream)
        streams = StreamSet(self.dataset, plan, local, epoch, source.collate_fn)
        began = time.monotonic()
        seconds = time.monotonic() - began if streams.resume(first_step, states) else 0.0
        return StreamFeed(streams, self._slots, first_step, lambda is_strided: self._note_stream(is_strided, seconds))

    def _serve(self, reader: Any, num_workers: int) -> Service:
        return Service(reader, self._source.workers, num_workers, self._pin, self._seed)

    def _note_stream(self, is_strided: bool, resume_seconds: float) -> None:
        name = type(self.dataset).__name__
        readers = self._slots.world_size * max(1, self.num_workers or 0)
        if is_strided and readers > 1:
            self._say_once(
                f"{name} does not ask torch.utils.data.get_worker_info() which part to read, so each of {readers} "
                "processes reads all of it and keeps its share"
            )
        if resume_seconds > SLOW_RESUME_SECONDS:
            self._say_once(
                f"going on inside the epoch took {resume_seconds:.0f} s of reading {name} from its start; a dataset "
                "with state_dict and load_state_dict goes on at once"
            )

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

"""DataLoaders: their batches, whether epochs get an order of their own, and the batch size of each process."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import fetch
from torch.utils.data.distributed import DistributedSampler

from instep.verify.record.generators import drawing_by, random_state
from instep.verify.record.patch import replace
from instep.verify.record.state import Recording, users_line


class Loaders:
    """The loaders of the script, in the order they were made."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.made = 0
        self.laps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.epochs_set: weakref.WeakSet[Any] = weakref.WeakSet()  # samplers whose set_epoch was called
        self.suspect: weakref.ref[Any] | None = None  # a shuffling sampler that was gone through without set_epoch
        self.second_lap = False
        self.batches = 0  # handed out while the rest of the epoch is passed over

    def wants_next_epoch(self) -> bool:
        """Whether it is worth while to see how the next epoch begins."""
        return self.suspect is not None and self.suspect() is not None and not self.second_lap


def record_loading(recording: Recording) -> None:
    loaders = Loaders(recording)
    recording.wants_next_epoch = loaders.wants_next_epoch
    replace((DataLoader,), "__init__", lambda original: _wrap_making(loaders, original))
    replace((DataLoader,), "__iter__", lambda original: _wrap_iter(loaders, original))
    replace((dataloader._BaseDataLoaderIter,), "__next__", lambda original: _wrap_next(loaders, original))
    replace((DistributedSampler,), "set_epoch", lambda original: _wrap_epoch(loaders, original))
    replace((torch,), "save", lambda original: _wrap_save(recording, original))
    replace((fetch._MapDatasetFetcher,), "fetch", lambda original: _wrap_fetch(recording, original))


def _wrap_making(loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        line = users_line()
        if not loaders.recording.closed and not loaders.recording.uses_run:
            _divide(loaders, bound, line)
        original(*bound.args, **bound.kwargs)

    return __init__


def _divide(loaders: Loaders, bound: inspect.BoundArguments, line: str) -> None:
    """Gives each process its part of the batch that the fewest processes trained with."""
    recording = loaders.recording
    given = bound.arguments.get("batch_size", 1)
    number, loaders.made = loaders.made, loaders.made + 1
    batch = given if isinstance(given, int) and bound.arguments.get("batch_sampler") is None else None
    used, known = batch, recording.options.loader_batches
    if recording.options.divide_loaders and batch is not None and number < len(known):
        whole = known[number] or 0
        part, rest = divmod(whole, recording.world_size)
        if whole and not rest and part != batch and (whole % batch == 0 or batch % part == 0) and batch > part:
            bound.arguments["batch_size"] = used = part
    recording.note("loader", number=number, line=line, given=batch, used=used)


def _sampler_of(loader: Any) -> DistributedSampler[Any] | None:
    for place in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(place, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def _wrap_iter(loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(self: Any) -> Any:
        recording = loaders.recording
        if recording.closed or recording.uses_run:
            return original(self)
        lap = loaders.laps[self] = loaders.laps.get(self, -1) + 1
        sampler = _sampler_of(self)
        if sampler is not None and torch.is_grad_enabled():
            _note_lap(loaders, sampler, lap, users_line())
            if recording.is_done and not loaders.wants_next_epoch():
                recording.end_script()
        return original(self)

    return __iter__


def _note_lap(loaders: Loaders, sampler: DistributedSampler[Any], lap: int, line: str) -> None:
    facts = {"rank": sampler.rank, "num_replicas": sampler.num_replicas, "drop_last": sampler.drop_last}
    loaders.recording.note(
        "lap",
        line=line,
        lap=lap,
        epoch=sampler.epoch,
        shuffle=sampler.shuffle,
        epoch_was_set=sampler in loaders.epochs_set,
        length=len(sampler.dataset),  # type: ignore[arg-type]
        **facts,
    )
    if sampler.shuffle and sampler not in loaders.epochs_set and lap == 0:
        loaders.suspect = weakref.ref(sampler)
    elif loaders.suspect is not None and loaders.suspect() is sampler:
        loaders.second_lap = True


def _wrap_next(loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:
        recording = loaders.recording
        if recording.is_done and not recording.closed and loaders.wants_next_epoch():
            recording.pass_over()
            raise StopIteration
        batch = original(self)
        if not recording.closed and not recording.is_done:
            recording.samples.fetch(batch)
            recording.seen_random = random_state()
        return batch

    return __next__


def _wrap_epoch(loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    def set_epoch(self: Any, epoch: int) -> None:
        loaders.epochs_set.add(self)
        original(self, epoch)

    return set_epoch


def _wrap_save(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """While an epoch is passed over nothing is saved: what would be written is not what the script had trained."""

    def save(*args: Any, **kwargs: Any) -> None:
        if not recording.skimming:
            original(*args, **kwargs)

    return save


def _wrap_fetch(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """Random augmentation of a sample depends on the sample, not on what was read before it, so that it can be compared.
    Runs in worker processes too, which are forked with it."""

    def fetch_samples(self: Any, possibly_batched_index: Any) -> Any:
        if recording.options.keep_random or recording.uses_run or not isinstance(possibly_batched_index, list):
            return original(self, possibly_batched_index)
        if not self.auto_collation:
            return original(self, possibly_batched_index)
        several = getattr(self.dataset, "__getitems__", None)  # as Subset has it
        rows = []
        for index in possibly_batched_index:
            with drawing_by(index):
                rows.append(several([index])[0] if several else self.dataset[index])
        return self.collate_fn(rows)

    return fetch_samples

"""Data loaders and samplers: how long a batch took, which one it was, and whether epochs and ranks get different ones."""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, dataloader
from torch.utils.data.distributed import DistributedSampler

from instep.launch.probe.exits import note_raised
from instep.launch.probe.nonfinite import remember_batch
from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import WINDOW, Recorder, contained, nothing
from instep.launch.probe.sample_sets import Seen, can_shuffle, length_of, print_data_set, print_order, print_subset
from instep.launch.probe.sites import is_users_file
from instep.launch.probe.tensor_prints import print_tensor, tensors_in
from instep.launch.probe.watched_steps import is_new
from instep.launch.probe.worker_memory import LOOK_AT, note_dead_workers, note_worker_memory
from instep.records import recording as layout

_ENTER, _LEAVE, _ENDED = (layout.KIND_NUMBER[name] for name in ("enter-data", "leave-data", "data-ended"))
_DATA = layout.SECONDS_OF.index("data")
_LISTED = WINDOW  # batches of a pass whose indices make up its order
_PRINTED = 96  # batches of each of the first passes that get a print; later every 32nd


@dataclass
class Loader:
    """A data loader of the script: its number, the line that made it, and how often it was gone through."""

    number: int
    made_at: int
    laps: int = 0
    described: bool = False
    batch_size: int = 0  # 0 where it is not known
    num_samples: int = 0  # of a whole pass on this rank


@dataclass
class Lap:
    """One pass over a loader. rests: of the recorder, when it began; -1 when it began in steps that were only counted."""

    loader: Loader
    number: int
    epoch: int | None
    site: int
    rests: int = 0
    batches: int = 0
    samples: int = 0  # of batches whose indices are known
    indices: int = 0  # of its first batches
    listed: int = 0  # how many these are
    started: float = 0.0
    first_seconds: float = 0.0  # from the start of the pass to its first batch, with the start of worker processes
    trained_before: int = 0
    done: bool = False
    seen: Seen | None = None


@dataclass
class Flow:
    """What comes out of an iterator: the pass over its loader, and the samples of the batches that it has drawn and not
    handed out yet; workers are given theirs long before."""

    lap: Lap | None = None
    rests: int = 0  # as that of the pass
    drawn: deque[list[int]] = field(default_factory=deque[list[int]])


class Loaders:
    """The loaders of this rank and the passes over them."""

    def __init__(self) -> None:
        self.known: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
        self.flows: weakref.WeakKeyDictionary[Any, Flow] = weakref.WeakKeyDictionary()
        self.sampler_sites: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.made = 0
        self._newest: tuple[Callable[[], Any], Flow] = (nothing, Flow())  # of the flows
        self.sites_of: dict[int, int] = {}  # by data set: the line of the script that made its newest loader

    def add(self, loader: Any, site: int) -> Loader:
        self.made += 1
        entry = self.known[loader] = Loader(self.made, site)
        return entry

    def add_made(self, loader: Any, site: int, by_user: bool) -> None:
        """by_user: the script made it itself. Training libraries make a loader anew out of the script's own, which is the
        one to change."""
        number = id(loader.dataset)
        if by_user:
            self.sites_of[number] = site
        self.add(loader, self.sites_of.get(number, site))

    def newest(self) -> tuple[Any, Flow]:
        """The iterator that was asked for last, None when it has gone."""
        return self._newest[0](), self._newest[1]

    def flow_of(self, iterator: Any) -> Flow:
        """Of the iterator that was asked for last it is at hand."""
        reference, flow = self._newest
        if reference() is not iterator:
            flow = self.flows.get(iterator) or self.flows.setdefault(iterator, Flow())
            self._newest = (weakref.ref(iterator), flow)
        return flow


def watch_data(recorder: Recorder) -> None:
    loaders = Loaders()
    iterator = dataloader._BaseDataLoaderIter
    recorder.count_batches = lambda: _count_newest(recorder, loaders)
    replace(DataLoader, "__init__", lambda original: _wrap_made(recorder, loaders, original))
    replace(DistributedSampler, "__init__", lambda original: _wrap_sampler(recorder, loaders, original))
    replace(DataLoader, "__iter__", lambda original: _wrap_iter(recorder, loaders, original))
    replace(iterator, "__next__", lambda original: _wrap_next(recorder, loaders, original))
    replace(iterator, "_next_index", lambda original: _wrap_index(recorder, loaders, original))
    replace(iterator, "_reset", lambda original: _wrap_reset(loaders, original))


def _wrap_made(recorder: Recorder, loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        site, by_user = recorder.sites.here(1), is_users_file(sys._getframe(1).f_code.co_filename)
        original(self, *args, **kwargs)
        contained(loaders.add_made)(self, site, by_user)

    return __init__


def _wrap_sampler(recorder: Recorder, loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        site = recorder.sites.here(1)
        original(self, *args, **kwargs)
        loaders.sampler_sites[self] = site

    return __init__


def _wrap_iter(recorder: Recorder, loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(self: Any) -> Any:
        site, started = recorder.sites.here(1), time.monotonic()
        _wake_for(recorder, loaders, self)
        iterator = original(self)
        _begin_lap(recorder, loaders, self, iterator, site, started)
        return iterator

    return __iter__


@contained
def _wake_for(recorder: Recorder, loaders: Loaders, loader: Any) -> None:
    entry = loaders.known.get(loader)
    if entry is None or is_new(entry.laps + 1):
        recorder.wake()


@contained
def _begin_lap(recorder: Recorder, loaders: Loaders, loader: Any, iterator: Any, site: int, started: float) -> None:
    entry = loaders.known.get(loader) or loaders.add(loader, 0)
    flow = loaders.flow_of(iterator)
    previous = flow.lap  # persistent workers hand out the same iterator again
    if previous is not None:
        _end_lap(recorder, previous, exhausted=False)
    sampler = find_sampler(loader)
    if not entry.described:
        entry.described = True
        _describe(recorder, loaders, loader, entry, sampler)
    entry.laps += 1
    epoch = getattr(sampler, "epoch", None)
    flow.rests = -1 if recorder.only_counts else recorder.rests
    flow.lap = Lap(
        entry,
        entry.laps,
        epoch if isinstance(epoch, int) else None,
        site,
        flow.rests,
        trained_before=recorder.backwards,
        started=started,
        seen=Seen(loader.dataset, entry.laps, length_of(loader.dataset)),
    )
    workers = getattr(iterator, "_workers", ())
    if workers:
        recorder.log.note("workers", loader=entry.number, pids=[worker.pid for worker in workers])


def find_sampler(loader: Any) -> Any:
    """The sampler that decides about order, under batch samplers and the wrappers of training libraries."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        sampler = inner if isinstance(inner, DistributedSampler) else sampler
    return sampler


def _describe(recorder: Recorder, loaders: Loaders, loader: Any, entry: Loader, sampler: Any) -> None:
    facts: dict[str, Any] = {}
    if isinstance(sampler, DistributedSampler):
        facts = {
            "replicas": sampler.num_replicas,
            "sampler_rank": sampler.rank,
            "shuffles": sampler.shuffle,
            "seed": sampler.seed,
            "padded": 0 if sampler.drop_last else sampler.total_size - (length_of(sampler.dataset) or 0),
            "sampler_site": loaders.sampler_sites.get(sampler, 0),
        }
    dataset = loader.dataset
    entry.batch_size, entry.num_samples = loader.batch_size or 0, length_of(getattr(loader, "sampler", None)) or 0
    recorder.log.note(
        "loader",
        loader=entry.number,
        site=entry.made_at,
        dataset=type(dataset).__name__,
        length=length_of(dataset),
        batches=length_of(loader),
        batch_size=loader.batch_size,
        workers=loader.num_workers,
        persistent=bool(loader.persistent_workers),
        sampler=type(sampler).__name__,
        subset=print_subset(dataset),
        content=print_data_set(dataset),
        **can_shuffle(sampler, getattr(loader, "batch_sampler", None), dataset),
        order=print_order(dataset),
        **facts,
    )


def _wrap_index(recorder: Recorder, loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    def _next_index(self: Any) -> Any:
        index = original(self)
        if recorder.only_counts:
            return index
        flow = loaders.flow_of(self)
        if type(index) is list and index and type(index[0]) is int:
            flow.drawn.append(index)
            lap = flow.lap
            if lap is not None and lap.listed < _LISTED and lap.rests == recorder.rests:
                lap.listed += 1
                lap.indices = hash((lap.indices, *index))
        else:
            flow.drawn.append([])
        return index

    return _next_index


def _wrap_reset(loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    """Persistent workers begin a pass: what the pass before had drawn and not handed out is void."""

    def _reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaders.flow_of(self).drawn.clear()
        return original(self, *args, **kwargs)

    return _reset


def _wrap_next(recorder: Recorder, loaders: Loaders, original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:
        site, started = (0, 0.0) if recorder.only_counts else _enter(recorder)
        try:
            batch = original(self)
        except StopIteration:
            _ended(recorder, loaders, self, site or recorder.sites.here(1), started)
            raise
        except Exception as error:
            note_dead_workers(recorder, self)
            note_raised(recorder, "data", site or recorder.sites.here(1), error)
            raise
        if not recorder.only_counts:
            _fetched(recorder, loaders, self, batch, site, started)
        return batch

    return __next__


def _enter(recorder: Recorder) -> tuple[int, float]:
    site = recorder.sites.here(2)
    return site, recorder.mark(_ENTER, 0, 0, site, 0)


@contained
def _ended(recorder: Recorder, loaders: Loaders, iterator: Any, site: int, started: float) -> None:
    """started: 0 when the call's beginning was not watched."""
    lap = loaders.flow_of(iterator).lap
    count = _count_batch(recorder, lap, iterator, 0)
    if lap is not None and recorder.only_counts and is_new(lap.number):
        recorder.wake()
    now = recorder.mark(_ENDED, 0, 0, site, count)
    if started:
        recorder.seconds[_DATA] += now - started
    if lap is not None:
        _end_lap(recorder, lap, exhausted=True)


def _end_lap(recorder: Recorder, lap: Lap, exhausted: bool) -> None:
    if lap.done:
        return
    lap.done = True
    is_followed = lap.rests == recorder.rests
    recorder.log.note(
        "lap",
        loader=lap.loader.number,
        lap=lap.number,
        epoch=lap.epoch,
        batches=lap.batches,
        samples=lap.samples if is_followed else _count_samples(lap),
        exhausted=exhausted,
        order=lap.indices & 0xFFFFFFFFFFFF if is_followed or lap.listed == _LISTED else 0,
        site=lap.site,
        first_seconds=round(lap.first_seconds, 4),
        seconds=round(time.monotonic() - lap.started, 4),
        backwards=recorder.backwards - lap.trained_before,
        seen=lap.seen.as_list() if lap.seen is not None and is_followed else [],
    )


def _count_samples(lap: Lap) -> int:
    """Of a pass that was not followed all the way; 0 for batches of unknown size."""
    return min(lap.batches * lap.loader.batch_size, lap.loader.num_samples)


def _count_batch(recorder: Recorder, lap: Lap | None, iterator: Any, more: int) -> int:
    """Number of the newest batch of a pass, counted from 1. more: batches since it was counted last, where the iterator
    does not say."""
    if lap is None:
        recorder.batches += more
        return 0
    count = max(lap.batches + more, getattr(iterator, "_num_yielded", 0))
    recorder.batches += count - lap.batches
    lap.batches = count
    return count


def count_rows(batch: Any) -> int:
    """Samples of a batch whose indices are not known: the length of its first tensor."""
    tensor = next((one for _, one in tensors_in(batch) if one.dim()), None)
    return tensor.shape[0] if tensor is not None else 0


@contained
def _count_newest(recorder: Recorder, loaders: Loaders) -> None:
    iterator, flow = loaders.newest()
    _count_batch(recorder, flow.lap, iterator, 0)


@contained
def _fetched(recorder: Recorder, loaders: Loaders, iterator: Any, batch: Any, site: int, started: float) -> None:
    """started: 0 when the call's beginning was not watched."""
    recorder.depth = 0
    recorder.open_step = None
    flow = loaders.flow_of(iterator)
    lap = flow.lap
    index, number, passes = _count_batch(recorder, lap, iterator, 1), 0, 0
    if lap is not None:
        number, passes = lap.loader.number, lap.number
        if index == 1:
            lap.first_seconds = time.monotonic() - lap.started
        if index in LOOK_AT:
            note_worker_memory(recorder, number, getattr(iterator, "_dataset", None), iterator)
    now = recorder.mark(_LEAVE, 0, 0, site, index)
    if started:
        recorder.seconds[_DATA] += now - started
    drawn = flow.drawn.popleft() if flow.drawn and flow.rests == recorder.rests else []
    if lap is not None:
        lap.samples += len(drawn)
        if lap.seen is not None:
            lap.seen.add(drawn)
    remember_batch(batch, drawn)
    recorder.rows += len(drawn) or count_rows(batch)
    if (passes <= 3 and index <= _PRINTED) or index % 32 == 1:
        leaves = list(tensors_in(batch))[:4]
        recorder.print_batch(number, passes, index, [print_tensor(tensor) for _, tensor in leaves])

"""Iterators over an iterable dataset: one per slot where the dataset splits itself, or one that is dealt out."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from instep.train.data.own_copy import own_copy
from instep.train.data.torch_worker import ShownWorker, showing
from instep.train.seeds import DATA, mix, set_generators

# What the generators are set for beside a step and a slot: the rest of a micro-batch after its first sample (the
# collating too), and opening a stream.
REST, OPENING = 1, 2


@dataclass(frozen=True)
class StreamPlan:
    """What a process needs to know to read any of the streams.

    prebatched: a sample of the dataset is a ready micro-batch; drop_last drops a micro-batch that is short.
    """

    num_streams: int
    micro_batch: int
    seed: int
    drop_last: bool
    prebatched: bool

    @property
    def unit(self) -> int:
        """Samples of the dataset that make a micro-batch."""
        return 1 if self.prebatched else self.micro_batch


class Stream:
    """One iterator. While its dataset runs, `get_worker_info()` shows it as one worker of several."""

    def __init__(self, dataset: Any, shown: ShownWorker) -> None:
        self.ended = False
        self.shown = shown
        self._dataset = shown.dataset = dataset
        self._iterator: Any = None
        self._ahead: list[Any] = []

    def open(self, state: Any = None) -> None:
        with showing(self.shown):
            if state is not None and hasattr(self._dataset, "load_state_dict"):
                self._dataset.load_state_dict(copy.deepcopy(state))
            self._iterator = iter(self._dataset)
            if state is not None and hasattr(self._iterator, "load_state_dict"):
                self._iterator.load_state_dict(copy.deepcopy(state))

    def look_ahead(self) -> None:
        self._ahead = self.pull(1)

    def pull(self, count: int) -> list[Any]:
        """The next samples, fewer at the end."""
        samples, self._ahead = self._ahead, []
        with showing(self.shown):
            while len(samples) < count and not self.ended:
                try:
                    samples.append(next(self._iterator))
                except StopIteration:
                    self.ended = True
        return samples

    def state(self) -> Any:
        """The iterator's own state, or its dataset's; None where neither keeps one."""
        keeper = self._iterator if hasattr(self._iterator, "state_dict") else self._dataset
        if not hasattr(keeper, "state_dict"):
            return None
        with showing(self.shown):  # copied: many give what they go on to change
            return copy.deepcopy(keeper.state_dict())


class SplitReader:
    """A stream of its own for each slot."""

    is_strided = False

    def __init__(self, dataset: Any, plan: StreamPlan, epoch: int, slots: Iterable[int]) -> None:
        self._dataset = dataset
        self._plan = plan
        self._epoch = epoch
        self._streams: dict[int, Stream] = {}
        self._before: dict[int, Any] = dict.fromkeys(slots)

    def adopt(self, slot: int, stream: Stream) -> None:
        self._streams[slot] = stream

    def first(self, step: int, slot: int) -> list[Any]:
        """The first sample of a micro-batch; all of it where a short one is dropped."""
        self._before[slot] = self.state(slot)
        if slot not in self._streams:
            self._streams[slot] = open_stream(self._dataset, self._plan, self._epoch, slot)
            self._streams[slot].look_ahead()
        set_generators(DATA, self._plan.seed, self._epoch, step, slot)
        samples = self._streams[slot].pull(1)
        if samples and self._plan.drop_last:
            set_generators(DATA, self._plan.seed, self._epoch, step, slot, REST)
            self.complete(slot, samples)
            return samples if len(samples) == self._plan.unit else []
        return samples

    def complete(self, slot: int, samples: list[Any]) -> None:
        if len(samples) < self._plan.unit:
            samples += self._streams[slot].pull(self._plan.unit - len(samples))

    def state(self, slot: int) -> Any:
        stream = self._streams.get(slot)
        return None if stream is None else _as_state(stream, self.is_strided)

    def state_before(self, slot: int) -> Any:
        return self._before[slot]


class StridedReader:
    """One stream of the whole data. Each process reads all of a step, under the same seeds, and keeps what is its."""

    is_strided = True

    def __init__(self, stream: Stream, plan: StreamPlan, epoch: int) -> None:
        self._stream = stream
        self._plan = plan
        self._epoch = epoch
        self._step = -1
        self._samples: list[Any] = []
        self._before: Any = None
        stream.shown.show_all()

    def first(self, step: int, slot: int) -> list[Any]:
        if self._step != step:
            self._read(step)
        return self._samples[slot :: self._plan.num_streams]

    def complete(self, slot: int, samples: list[Any]) -> None:
        pass

    def state(self, slot: int) -> Any:
        return None if self._step < 0 else _as_state(self._stream, self.is_strided)

    def state_before(self, slot: int) -> Any:
        return self._before

    def _read(self, step: int) -> None:
        self._before = self.state(0)
        self._step = step
        set_generators(DATA, self._plan.seed, self._epoch, step, self._plan.num_streams)
        wanted = self._plan.num_streams * self._plan.unit
        self._samples = self._stream.pull(wanted)
        if self._plan.drop_last and len(self._samples) < wanted:
            self._samples = []


def open_stream(dataset: Any, plan: StreamPlan, epoch: int, slot: int, state: Any = None) -> Stream:
    """All streams open under one seed: a dataset that shuffles its files by a global generator and then takes every
    M-th of them neither loses nor doubles one."""
    set_generators(DATA, plan.seed, epoch, OPENING)
    shown = ShownWorker(slot, plan.num_streams, mix(DATA, plan.seed, epoch), None)
    stream = Stream(own_copy(dataset), shown)
    stream.open(state)
    return stream


def _as_state(stream: Stream, is_strided: bool) -> Any:
    state = stream.state()
    if state is None and not stream.ended:
        return None
    return {"strided": is_strided, "ended": stream.ended, "dataset": state}

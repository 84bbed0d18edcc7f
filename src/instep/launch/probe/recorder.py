"""What the wrappers write to: the marks of this rank, its counts and the time it spent."""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

from instep.launch.probe.event_log import EventLog
from instep.launch.probe.sites import Sites
from instep.records import recording as layout

Answer = TypeVar("Answer")
_ALL_SECONDS = struct.Struct(f"<{len(layout.SECONDS_OF)}d")
_pack_mark, _pack_step, _pack_number = layout.MARK.pack_into, layout.STEP.pack_into, layout.U64.pack_into
_pack_seconds = _ALL_SECONDS.pack_into
_MARKS, _MARK_BYTES, _SLOTS = layout.MARKS, layout.MARK.size, layout.NUM_MARK_SLOTS
_WAITS = (layout.KIND_NUMBER["enter-collective"], layout.KIND_NUMBER["enter-backward"])
_TRIED = range(2, 16)  # steps in which each mark reads the count of collectives; the first two hold what happens once
_LEAVE_STEP, _LEAVE_BACKWARD = layout.KIND_NUMBER["leave-step"], layout.KIND_NUMBER["leave-backward"]
_STARTS = (layout.KIND_NUMBER["leave-collective"], _LEAVE_BACKWARD)  # here it grows in any script
_ALL = range(len(layout.KINDS))
# In short steps these wait for the next mark of another kind, or for the thread that watches: what is written each by
# itself costs most of what is watched, since the processor has forgotten by then how to.
_LATER = tuple(
    layout.KIND_NUMBER[f"{end}-{part}"] for end in ("enter", "leave") for part in ("data", "forward", "step")
)
_AT_ONCE_STEPS, _SHORT_SECONDS, _MOST_WAITING = 64, 0.05, 48
WINDOW = 32  # steps in a row that are watched at least, where others are only counted
_EVERYWHERE = [kind != _LEAVE_BACKWARD for kind in _ALL]  # who leaves that mark has read it just before


class Recorder:
    """One per rank. The counts are those of the main thread's work; other threads only leave marks."""

    def __init__(self, page: mmap.mmap | bytearray, log: EventLog, rank: int, world_size: int) -> None:
        self.page: mmap.mmap | bytearray = page
        self.log = log
        self.sites = Sites(log)
        self.rank, self.world_size = rank, world_size
        self.main_thread = threading.main_thread().ident
        self.num_marks = self.num_steps = self.forwards = self.reduced = self.backwards = self.batches = self.calls = 0
        self.num_batch_prints = self.num_seeds = 0
        self._printed_at = 0  # place of the newest print, until its batch has been used
        self.rows = 0  # samples that data loaders have handed out
        self.seen_lines: deque[tuple[float, str, int]] = deque(maxlen=64)  # by the watching thread, outside of waits
        self.turns = 0  # forwards through a wrapped model whose backward has to average
        self.depth = 0
        self.kind = 0  # of the newest mark
        self.costs: dict[int, list[float]] = {}  # by line: collectives that the script called, and their seconds
        self.sample_stack: Callable[[FrameType | None], None] | None = None
        self.has_sent = self.has_joined = False
        self.open_step: int | None = None
        self.given_address = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))  # by the launcher
        self.replay_path: Path | None = None  # for the operation that makes the first bad number
        self.seconds = [0.0] * len(layout.SECONDS_OF)
        self.sequence = 0  # operations given to the default group, as they were counted last
        self._reads = _EVERYWHERE
        self._grows = [kind in _STARTS for kind in _ALL]
        self.is_watched = False  # by a thread, which flushes as well
        self._marks: deque[tuple[Any, ...]] = deque()  # that wait to be written
        self._steps: deque[tuple[tuple[Any, ...], tuple[float, ...]]] = deque()
        self._holds_back, self._step_ended = False, 0.0
        self.only_counts = False  # of these steps: no marks are left (see watched_steps.py)
        self.rests = 0  # how often that began
        self.keeps_awake: list[Callable[[], bool]] = []  # whether something needs each step to be watched
        self.count_batches: Callable[[], None] = nothing  # brings `batches` up to date
        self.start_watching: Callable[[], None] = nothing  # starts the thread, where it does not run yet
        self.is_cut, self.woken_at = False, 0.0  # the step that runs is watched from there on, not from its beginning
        self.awake_until = 0  # number of the step up to which all are watched

    def mark(
        self, kind: int, operation: int = 0, flags: int = 0, site: int = 0, count: int = 0, elements: int = 0
    ) -> float:
        """Leaves one mark and returns its time."""
        self.kind = kind
        if self._reads[kind]:
            self.read_sequence(kind)
        if get_ident() != self.main_thread:
            flags |= layout.OTHER_THREAD
        now, number, rows = monotonic(), self.num_marks, self._marks
        at, step = _MARKS + number % _SLOTS * _MARK_BYTES, self.num_steps & 0xFFFFFFFF
        rows.append((at, kind, operation, flags, site, self.sequence, step, count, elements, now))
        self.num_marks = number + 1
        if not self._holds_back or kind not in _LATER or len(rows) > _MOST_WAITING:
            self.flush()
        return now

    def wake(self) -> None:
        """From here on marks are left, for some steps. Called by the main thread, or by the one that watches."""
        self.awake_until = self.num_steps + WINDOW
        if self.only_counts:
            self.woken_at, self.is_cut = monotonic(), True
            self.sequence = count_operations()
            self.only_counts = False

    def mark_from_outside(self, kind: int, site: int, sequence: int, elements: int = 0) -> None:
        """By the watching thread: what the main thread has come to while it left no marks."""
        number, self.kind = self.num_marks, kind
        at, step = _MARKS + number % _SLOTS * _MARK_BYTES, self.num_steps & 0xFFFFFFFF
        self._marks.append((at, kind, 0, 0, site, sequence, step, 0, elements, monotonic()))
        self.num_marks = number + 1
        self.flush()

    def flush(self) -> None:
        """Writes into the page what waits to be written. Called by the main thread, and some times a second by the one
        that watches; each row is taken by one of them, and has its place already."""
        page, number, rows = self.page, self.num_marks, self._marks
        try:
            while rows:
                _pack_mark(page, *rows.popleft())
            _pack_number(page, layout.NUM_MARKS, number)
            if self._steps:
                self._flush_steps(page)
            elif self.rests:
                _pack_number(page, layout.NUM_STEPS, self.num_steps)  # the last ones may have been counted only
        except IndexError:
            return  # the other thread was faster

    def _flush_steps(self, page: mmap.mmap | bytearray) -> None:
        while self._steps:
            row, seconds = self._steps.popleft()
            _pack_step(page, layout.STEPS + (row[0] - 1) % layout.NUM_STEP_SLOTS * layout.STEP.size, *row)
            _pack_number(page, layout.NUM_STEPS, row[0])
            _pack_seconds(page, layout.SECONDS, *seconds)

    @property
    def waits(self) -> bool:
        """Whether the newest mark is one after which the rank may wait for others."""
        return self.kind in _WAITS

    def read_sequence(self, kind: int) -> int:
        """For a mark of this kind. Reading it takes longer than all the rest of a mark, so after some steps it is read only where waiting may begin
        and where it was seen to grow. Once it grows elsewhere, by what was not known before, all marks read it again."""
        sequence = count_operations()
        if sequence != self.sequence:
            self.sequence = sequence
            if not self._grows[kind]:
                self._grows[kind] = True
                self._reads = _EVERYWHERE
        return sequence

    def _choose_reads(self) -> None:
        """At the ends of the steps in which all marks read the sequence; what happens once comes before them."""
        if self.num_steps == _TRIED.start:
            self._grows = [kind in _STARTS for kind in _ALL]
        elif self.num_steps == _TRIED.stop:
            self._reads = [_EVERYWHERE[kind] and (kind in _WAITS or self._grows[kind]) for kind in _ALL]

    def end_step(self, site: int, rate: float) -> None:
        number, now = self.num_steps + 1, monotonic()
        if self._reads[_LEAVE_STEP]:
            self.read_sequence(_LEAVE_STEP)
        turns, rate = self.turns & 0xFFFFFFFF, rate if math.isfinite(rate) else 0.0
        counts = (self.reduced, self.backwards, self.batches, self.calls)
        self._steps.append(((number, self.sequence, turns, *counts, site, rate, now), tuple(self.seconds)))
        self.num_steps = self.log.step = number
        if number <= _TRIED.stop:
            self._choose_reads()
        is_fast = now - self._step_ended < _SHORT_SECONDS and number > _AT_ONCE_STEPS
        self._step_ended, self._holds_back = now, is_fast and (self.is_watched or self.world_size == 1)
        if not self._holds_back:
            self.flush()

    def spend(self, index: int, seconds: float) -> None:
        """Adds to a sum; the end of a step shows them all."""
        self.seconds[index] += seconds

    def print_batch(self, loader: int, lap: int, index: int, prints: list[int]) -> None:
        """Writes the print of the batch that is about to be used."""
        self._printed_at = layout.BATCHES + self.num_batch_prints % layout.NUM_BATCH_SLOTS * layout.BATCH.size
        padded = [*prints, 0, 0, 0, 0][:4]
        layout.BATCH.pack_into(self.page, self._printed_at, loader, lap, index & 0xFFFFFFFF, 0, *padded)
        self.num_batch_prints += 1
        _pack_number(self.page, layout.NUM_BATCHES, self.num_batch_prints)

    def mark_trained(self) -> None:
        """The newest batch has been used for gradients."""
        if self._printed_at:
            struct.pack_into("<I", self.page, self._printed_at + 12, layout.TRAINED)
            self._printed_at = 0

    def reset_seconds(self) -> None:
        """After the first steps, which are slower than the rest."""
        self.seconds = [0.0] * len(layout.SECONDS_OF)
        self.costs.clear()

    def forget(self) -> None:
        """For a forked child, which is not this rank: it writes into memory of its own."""
        self.page = bytearray(layout.PAGE_BYTES)
        self._marks.clear()
        self.log.forget()


def nothing() -> None:
    return None


_groups: list[Any] = []  # torch's table of process groups, once it was found


def count_operations() -> int:
    """How many operations this rank has given to the default group, point-to-point ones included; 0 without one."""
    try:
        group = (_groups or _find_groups())[0]._default_pg
        return group._get_sequence_number_for_group() if group is not None else 0
    except (RuntimeError, AttributeError, IndexError):
        return 0


def _find_groups() -> list[Any]:
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is not None:
        _groups.append(module._world)
    return _groups


_noted: set[tuple[str, str]] = set()
_current: Recorder | None = None


def make_current(recorder: Recorder) -> None:
    global _current
    _current = recorder
    os.register_at_fork(after_in_child=recorder.forget)


def current() -> Recorder | None:
    """The recorder of this rank, once there is one."""
    return _current


def contained(function: Callable[..., Answer]) -> Callable[..., Answer | None]:
    """A piece of watching that must never break the script: what it raises is noted once in the rank's events."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Answer | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # whatever goes wrong in watching, the script goes on
            if is_from_signal(error):
                raise
            note_failure(function.__qualname__, error)
            return None

    return call


def is_from_signal(error: BaseException) -> bool:
    """Whether a signal handler of the script raised it and only happened to run inside our code: it is the script's."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount][:3]
        if len(arguments) >= 2 and isinstance(frame.f_locals.get(arguments[-1]), FrameType):
            return True
        trace = trace.tb_next
    return False


def note_failure(place: str, error: BaseException) -> None:
    key = (place, type(error).__name__)
    if key not in _noted and _current is not None:
        _noted.add(key)
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""
        _current.log.note("probe-failed", place=place, error=f"{type(error).__name__}: {error}", line=line)

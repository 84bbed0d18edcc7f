"""What the wrappers write to: the marks of this rank, its counts and the time it spent."""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from instep.launch.probe.event_log import EventLog
from instep.launch.probe.sites import Sites
from instep.records import recording as layout

Answer = TypeVar("Answer")
_ALL_SECONDS = struct.Struct(f"<{len(layout.SECONDS_OF)}d")
_WAITS = (layout.KIND_NUMBER["enter-collective"], layout.KIND_NUMBER["enter-backward"])


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
        self.rows = 0  # samples that data loaders have handed out
        self.seen_lines: deque[tuple[float, str, int]] = deque(maxlen=64)  # by the watching thread, outside of waits
        self.turns = 0  # forwards through a wrapped model whose backward has to average
        self.depth = 0
        self.waits = False
        self.kind = 0  # of the newest mark
        self.costs: dict[int, list[float]] = {}  # by line: collectives that the script called, and their seconds
        self.sample_stack: Callable[[FrameType | None], None] | None = None
        self.has_sent = self.has_joined = False
        self.open_step: int | None = None
        self.given_address = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))  # by the launcher
        self.replay_path: Path | None = None  # for the operation that makes the first bad number
        self.seconds = [0.0] * len(layout.SECONDS_OF)
        self._sequence: Callable[[], int] | None = None
        self._group: Any = None

    def mark(
        self, kind: int, operation: int = 0, flags: int = 0, site: int = 0, count: int = 0, elements: int = 0
    ) -> float:
        """Writes one mark and returns its time."""
        number = self.num_marks
        self.kind, self.waits = kind, kind in _WAITS
        now = time.monotonic()
        if threading.get_ident() != self.main_thread:
            flags |= layout.OTHER_THREAD
        layout.MARK.pack_into(
            self.page,
            layout.MARKS + number % layout.NUM_MARK_SLOTS * layout.MARK.size,
            kind,
            operation,
            flags,
            site,
            self.sequence(),
            self.num_steps & 0xFFFFFFFF,
            count,
            elements,
            now,
        )
        self.num_marks = number + 1
        layout.U64.pack_into(self.page, layout.NUM_MARKS, number + 1)
        return now

    def sequence(self) -> int:
        """How many operations this rank has given to the default group, point-to-point ones included; 0 without one."""
        group = _default_group()
        if group is None:
            return 0
        try:
            return group._get_sequence_number_for_group()
        except (RuntimeError, AttributeError):
            return 0

    def end_step(self, site: int, rate: float) -> None:
        number = self.num_steps + 1
        layout.STEP.pack_into(
            self.page,
            layout.STEPS + (number - 1) % layout.NUM_STEP_SLOTS * layout.STEP.size,
            number,
            self.sequence(),
            self.turns & 0xFFFFFFFF,
            self.reduced,
            self.backwards,
            self.batches,
            self.calls,
            site,
            rate if math.isfinite(rate) else 0.0,
            time.monotonic(),
        )
        self.num_steps = self.log.step = number
        layout.U64.pack_into(self.page, layout.NUM_STEPS, number)

    def spend(self, index: int, seconds: float) -> None:
        """Adds to a sum; `write_seconds` shows them all."""
        self.seconds[index] += seconds

    def write_seconds(self) -> None:
        _ALL_SECONDS.pack_into(self.page, layout.SECONDS, *self.seconds)

    def print_batch(self, loader: int, lap: int, index: int, prints: list[int]) -> None:
        """Writes the print of the batch that is about to be used."""
        at = layout.BATCHES + self.num_batch_prints % layout.NUM_BATCH_SLOTS * layout.BATCH.size
        padded = [*prints, 0, 0, 0, 0][:4]
        layout.BATCH.pack_into(self.page, at, loader, lap, index & 0xFFFFFFFF, 0, *padded)
        self.num_batch_prints += 1
        layout.U64.pack_into(self.page, layout.NUM_BATCHES, self.num_batch_prints)

    def mark_trained(self) -> None:
        """The newest batch has been used for gradients."""
        if self.num_batch_prints:
            at = layout.BATCHES + (self.num_batch_prints - 1) % layout.NUM_BATCH_SLOTS * layout.BATCH.size
            struct.pack_into("<I", self.page, at + 12, layout.TRAINED)

    def reset_seconds(self) -> None:
        """After the first steps, which are slower than the rest."""
        self.seconds = [0.0] * len(layout.SECONDS_OF)
        self.costs.clear()

    def forget(self) -> None:
        """For a forked child, which is not this rank: it writes into memory of its own."""
        self.page = bytearray(layout.PAGE_BYTES)
        self.log.forget()


def _default_group() -> Any:
    world = sys.modules.get("torch.distributed.distributed_c10d")
    return world._world.default_pg if world is not None else None


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

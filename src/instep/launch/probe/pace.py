"""The rank's own time of each step: how it depends on the number of samples, and steps that took much longer than usual."""

from __future__ import annotations

import atexit
import math
import statistics
from collections import deque
from collections.abc import Callable

from instep.launch.probe.recorder import Recorder, contained
from instep.records import recording as layout

SLOW_RATIO, SLOW_SECONDS = 3.0, 0.02  # a slow step: so many times the usual own time, and so much more
_PARTS = ("data", "forward", "backward_cpu", "step")
_INDICES = tuple(layout.SECONDS_OF.index(name) for name in _PARTS)
_MOST_SIZES, _KEPT = 8, 64  # different numbers of samples per step; times of each
_REFRESHED = 16  # steps between two looks at what is usual
_FIRST_NOTE = 64


class Pace:
    """`add` is called at the end of each optimizer step, without the first ones."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._rows = recorder.rows
        self._by_rows: dict[int, deque[float]] = {}
        self._seconds = recorder.seconds[:]
        self._limit = math.inf  # of a step that is not slow
        self._newest: deque[float] = deque(maxlen=33)
        self._count = 0
        self.usual = 0.0  # median of the newest steps; 0 when there are too few
        atexit.register(self.note)

    def begin(self) -> None:
        """From here on steps count."""
        self._rows, self._seconds = self._recorder.rows, self._recorder.seconds[:]

    def add(self, own: float, started: float, read_delay: Callable[[], float]) -> None:
        """own: seconds of this step without waiting for other ranks; read_delay: the most of it that may have been
        spent waiting for a core. It takes 20 us, so it is asked of steps alone that look slow."""
        recorder = self._recorder
        rows, seconds = recorder.rows - self._rows, recorder.seconds[:]
        if own > self._limit and (own := own - read_delay()) > self._limit:
            self._note_slow(own, started, seconds)
        elif rows:
            self._add_rows(rows, own)
        self._newest.append(own)
        self._count += 1
        if self._count % _REFRESHED == 0:
            self.usual = usual = statistics.median(self._newest)
            self._limit = max(SLOW_RATIO * usual, usual + SLOW_SECONDS) if usual > 0 else math.inf
        self._rows, self._seconds = recorder.rows, seconds
        step = recorder.num_steps
        if step & (step - 1) == 0 and step >= _FIRST_NOTE:
            self.note()

    def _add_rows(self, rows: int, own: float) -> None:
        times = self._by_rows.get(rows)
        if times is None and len(self._by_rows) < _MOST_SIZES:
            times = self._by_rows[rows] = deque(maxlen=_KEPT)
        if times is not None:
            times.append(own)

    def _note_slow(self, own: float, started: float, seconds: list[float]) -> None:
        spent = {name: round(seconds[index] - self._seconds[index], 6) for name, index in zip(_PARTS, _INDICES)}
        seen = [[file, line] for when, file, line in list(self._recorder.seen_lines) if when >= started]
        self._recorder.log.note(
            "slow-step", own=round(own, 6), usual=round(self.usual, 6), spent=spent, seen=seen[-16:]
        )

    @contained
    def note(self) -> None:
        rows = [[rows, len(times), round(statistics.median(times), 7)] for rows, times in sorted(self._by_rows.items())]
        if rows:
            self._recorder.log.note("pace", by_rows=rows)

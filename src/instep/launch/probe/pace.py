"""The rank's own time of each step: how it depends on the number of samples, and steps that took much longer than usual."""

from __future__ import annotations

import atexit
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
        self._sums = [0.0] * len(_INDICES)
        self._newest: deque[float] = deque(maxlen=33)
        self._count = 0
        self.usual = 0.0  # median of the newest steps; 0 when there are too few
        atexit.register(self.note)

    def begin(self) -> None:
        """From here on steps count."""
        self._rows = self._recorder.rows
        self._sums = [self._recorder.seconds[index] for index in _INDICES]

    def add(self, own: float, started: float, read_delay: Callable[[], float]) -> None:
        """own: seconds of this step without waiting for other ranks; read_delay: the most of it that may have been
        spent waiting for a core. It takes 20 us, so it is asked of steps alone that look slow."""
        recorder = self._recorder
        rows = recorder.rows - self._rows
        sums = [recorder.seconds[index] for index in _INDICES]
        if self._is_slow(own) and self._is_slow(own := own - read_delay()):
            self._note_slow(own, started, sums)
        elif rows:
            self._add_rows(rows, own)
        self._newest.append(own)
        self._count += 1
        if self._count % _REFRESHED == 0:
            self.usual = statistics.median(self._newest)
        self._rows, self._sums = recorder.rows, sums
        step = recorder.num_steps
        if step >= _FIRST_NOTE and step & (step - 1) == 0:
            self.note()

    def _is_slow(self, own: float) -> bool:
        return self.usual > 0 and own > max(SLOW_RATIO * self.usual, self.usual + SLOW_SECONDS)

    def _add_rows(self, rows: int, own: float) -> None:
        times = self._by_rows.get(rows)
        if times is None and len(self._by_rows) < _MOST_SIZES:
            times = self._by_rows[rows] = deque(maxlen=_KEPT)
        if times is not None:
            times.append(own)

    def _note_slow(self, own: float, started: float, sums: list[float]) -> None:
        spent = {name: round(now - before, 6) for name, now, before in zip(_PARTS, sums, self._sums)}
        seen = [[file, line] for when, file, line in list(self._recorder.seen_lines) if when >= started]
        self._recorder.log.note(
            "slow-step", own=round(own, 6), usual=round(self.usual, 6), spent=spent, seen=seen[-16:]
        )

    @contained
    def note(self) -> None:
        rows = [[rows, len(times), round(statistics.median(times), 7)] for rows, times in sorted(self._by_rows.items())]
        if rows:
            self._recorder.log.note("pace", by_rows=rows)

"""Where the time of steps goes: sums over all of them, and the rank's own time of a usual one."""

from __future__ import annotations

import statistics
import time
from collections import deque

from instep.launch.probe.pace import Pace
from instep.launch.probe.recorder import Recorder
from instep.records import recording as layout

_TOTAL, _STEPS, _OWN = (layout.SECONDS_OF.index(name) for name in ("total", "steps", "usual_own"))
_BACKWARD, _CPU = layout.SECONDS_OF.index("backward"), layout.SECONDS_OF.index("backward_cpu")
_COLLECTIVE, _DELAYED = layout.SECONDS_OF.index("collective"), layout.SECONDS_OF.index("delayed")
_PARTS = tuple(layout.SECONDS_OF.index(name) for name in ("data", "forward", "backward", "backward_cpu", "step"))
_BLOCK_STEPS, _BLOCK_SECONDS = 16, 0.25  # at least: ending one takes 50 us


class StepTimes:
    """Time from the end of one step to the end of the next, as soon as five backwards have gone by."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pace = Pace(recorder)
        self.last_end = 0.0
        self._waited = 0.0
        self._own = self._delayed = self._worked = self._next_block = 0.0
        self._counted = 0
        self._blocks: deque[float] = deque(maxlen=32)
        self._window: tuple[float, list[float]] = (0.0, [])  # when it began, and the sums then
        self._shares: list[float] = []  # of the newest window that was watched: of its time, by part
        self._rested = (0.0, 0, 0.0)  # when resting began, and the steps and the delays until then

    def add(self, now: float) -> None:
        """At the end of each step that was watched."""
        recorder, sums = self._recorder, self._recorder.seconds
        if not self.last_end:
            if recorder.backwards >= 5:
                recorder.reset_seconds()
                self.begin(now)
            return
        waited = self._sum_waits()
        own = now - self.last_end - (waited - self._waited)
        sums[_TOTAL] += now - self.last_end
        sums[_STEPS] += 1
        self._own += own
        self._pace.add(own, self.last_end, self._delay_so_far)
        self._counted += 1
        if self._counted >= _BLOCK_STEPS and now >= self._next_block:
            self._end_block()
            self._next_block = now + _BLOCK_SECONDS
        self.last_end, self._waited = now, waited

    def begin(self, now: float) -> None:
        """The next step is the first of some that are watched."""
        self.last_end, self._waited = now, self._sum_waits()
        self._own, self._counted = 0.0, 0
        self._delayed, self._worked = read_run_delay(), time.thread_time()
        self._pace.begin()
        self._window = now, self._recorder.seconds[:]

    def usual_seconds(self, now: float) -> float:
        """Of a step of the window that ends; 0 when there were none."""
        began, before = self._window
        steps = self._recorder.seconds[_STEPS] - before[_STEPS] if before else 0
        return (now - began) / steps if steps else 0.0

    def rest(self, now: float) -> None:
        """The next steps are only counted."""
        began, before = self._window
        sums, lasted = self._recorder.seconds, max(now - began, 1e-9)
        self._shares = [(sums[part] - before[part]) / lasted for part in _PARTS]
        self._rested = now, self._recorder.num_steps, read_run_delay()

    def resume(self, now: float) -> None:
        """After resting: its parts are taken to be as those of the window before, its length and its steps are known."""
        sums, (since, steps, delayed) = self._recorder.seconds, self._rested
        sums[_TOTAL] += now - since
        sums[_STEPS] += self._recorder.num_steps - steps
        sums[_DELAYED] += read_run_delay() - delayed
        for part, share in zip(_PARTS, self._shares):
            sums[part] += share * (now - since)

    def end_cut(self, now: float) -> None:
        """At the end of a step that was watched from somewhere in its middle, after `resume`."""
        self._recorder.seconds[_TOTAL] += now - self._recorder.woken_at
        self.begin(now)

    def _sum_waits(self) -> float:
        sums = self._recorder.seconds
        return sums[_COLLECTIVE] + sums[_BACKWARD] - sums[_CPU]

    def _delay_so_far(self) -> float:
        """Since the block began: no less than that of the newest step."""
        return read_run_delay() - self._delayed

    def _end_block(self) -> None:
        """The rank's own time per step, without what it waited for a core: a busy machine is nobody's fault."""
        delayed, worked = read_run_delay(), time.thread_time()
        # Delays inside of waits are taken off twice; what the thread has worked is the least there can be.
        own = max(self._own - (delayed - self._delayed), worked - self._worked)
        self._blocks.append(max(0.0, own) / self._counted)
        recorder = self._recorder
        recorder.spend(_OWN, statistics.median(self._blocks) - recorder.seconds[_OWN])
        recorder.spend(_DELAYED, delayed - self._delayed)
        self._own, self._counted, self._delayed, self._worked = 0.0, 0, delayed, worked


def read_run_delay() -> float:
    """Seconds that this thread was ready to run and had no core; 0 where the kernel does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0

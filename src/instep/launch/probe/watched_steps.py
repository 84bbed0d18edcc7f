"""Which steps are watched: at first all of them; of short ones later some in a row, now and then, and the rest is counted.

Watching a step takes some tenths of a millisecond, most of them because the processor has forgotten the code meanwhile.
Counted steps leave no marks: losses are still looked at, collectives that the script calls are marked, and where the rank
stands still the thread that watches says from outside what it has come to (`standing.py`), and has the next steps watched.
Ranks may choose differently: windows of any period begin in steps in which those of the shorter periods begin too.
"""

from __future__ import annotations

from time import monotonic

from instep.launch.probe.fingerprints import Fingerprints
from instep.launch.probe.nonfinite import remember_batch
from instep.launch.probe.recorder import WINDOW, Recorder, contained, count_operations
from instep.launch.probe.step_times import StepTimes

FIRST_STEPS, FIRST_SECONDS = 1024, 20.0  # all watched, until both are over
_PERIODS = (
    (0.01, 4096),
    (0.02, 1024),
    (0.08, 256),
)  # for steps shorter than so many seconds; longer ones are all watched


class WatchedSteps:
    """Decides at the end of each step."""

    def __init__(self, recorder: Recorder, times: StepTimes, fingerprints: Fingerprints) -> None:
        self._recorder, self._times, self._fingerprints = recorder, times, fingerprints
        self._first_at = 0.0
        self._next_choice = 0
        self._window_at = 0
        self._wake_at = 0
        self.has_nested = False  # optimizers whose step makes those of others: counting would count them all

    def end_watched(self, now: float) -> None:
        """Of a step that was watched, at least from somewhere in its middle."""
        recorder = self._recorder
        step = recorder.num_steps
        if recorder.is_cut:
            recorder.is_cut = False
            self._times.resume(recorder.woken_at)
            self._times.end_cut(now)
            self._next_choice = step
        else:
            self._times.add(now)
        if step >= self._fingerprints.next_step:
            self._fingerprints.look(step)
        self._first_at = self._first_at or now
        if step >= self._next_choice:
            self._choose(step, now)

    def end_counted(self) -> None:
        recorder = self._recorder
        recorder.num_steps = recorder.log.step = step = recorder.num_steps + 1
        if step >= self._wake_at:
            self._end_rest(step)

    def _choose(self, step: int, now: float) -> None:
        """Whether the next steps are only counted."""
        period = choose_period(self._times.usual_seconds(now))
        is_early = step < FIRST_STEPS or now - self._first_at < FIRST_SECONDS
        if step < self._recorder.awake_until:
            self._next_choice = self._recorder.awake_until
        elif is_early or not period or self.has_nested or any(need() for need in self._recorder.keeps_awake):
            self._next_choice = step + WINDOW
        elif (step + 1) % period < WINDOW:
            self._next_choice = (step + 1) // period * period + WINDOW - 1
        else:
            self._window_at = (step // period + 1) * period - 1
            self._rest(now)

    def _rest(self, now: float) -> None:
        recorder = self._recorder
        self._times.rest(now)
        self._wake_at = min(self._window_at, self._fingerprints.next_step)
        remember_batch((), [])
        recorder.flush()
        recorder.start_watching()
        recorder.rests += 1
        recorder.only_counts = True

    @contained
    def _end_rest(self, step: int) -> None:
        recorder = self._recorder
        if step >= self._fingerprints.next_step:
            self._fingerprints.look(step)
        self._wake_at = min(self._window_at, self._fingerprints.next_step)
        if step >= self._window_at:
            now = monotonic()
            self._times.resume(now)
            self._times.begin(now)
            self._next_choice = step + WINDOW
            recorder.sequence = count_operations()
            recorder.only_counts = False


def choose_period(seconds: float) -> int:
    """Steps from one window to the next, by the length of a step; 0 when all are to be watched."""
    return next((period for limit, period in _PERIODS if 0 < seconds < limit), 0)


def is_new(times: int) -> bool:
    """Whether what happens for that time is to be watched: the first times, and ever more seldom."""
    return times <= 8 or times & (times - 1) == 0

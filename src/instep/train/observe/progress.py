"""How far a run is: one live line on a terminal, a few plain lines in a log.

Both are paced by time, so that the cost does not grow with the number of steps: a look at the clock per step.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from instep.units import format_seconds

if TYPE_CHECKING:
    from rich.live import Live

LIVE_SECONDS = 0.2  # a refresh takes rich about half a millisecond
FIRST_GAP_SECONDS, LONGEST_GAP_SECONDS = 2.0, 60.0  # between lines of a log: doubled until the longest


class Mark(NamedTuple):
    """Counts at one moment."""

    seconds: float
    steps: int
    samples: float


class Position(NamedTuple):
    """What a line says about where the run is; None where unknown."""

    step: int
    total: int | None
    epoch: int
    loss: float | None
    skipped: int


def progress_text(position: Position, old: Mark, new: Mark, steps_left: int | None) -> str:
    """`step 120/1000 | epoch 1 | loss 2.3451 | 5,210 samples/s | 3 min left`; rates are between two marks."""
    total = "" if position.total is None else f"/{position.total}"
    parts = [f"step {position.step}{total}", f"epoch {position.epoch}"]
    if position.loss is not None:
        parts.append(f"loss {position.loss:.4f}" if 1e-2 <= abs(position.loss) < 1e4 else f"loss {position.loss:.3g}")
    seconds, steps = new.seconds - old.seconds, new.steps - old.steps
    if seconds > 0 and steps > 0:
        parts.append(f"{_rate(new.samples - old.samples, seconds)} samples/s")
        if steps_left:
            parts.append(f"{format_seconds(steps_left * seconds / steps)} left")
    if position.skipped:
        parts.append(f"{position.skipped} skipped")
    return " | ".join(parts)


def _rate(samples: float, seconds: float) -> str:
    rate = samples / seconds
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Progress:
    """Counts steps and shows them on `stream`; every line of ours goes through `say`."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.perf_counter, piped_to_terminal: bool = False
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._screen: LiveLine | PipedLine | None = None
        if is_terminal(stream):
            self._screen = LiveLine(stream)
        elif piped_to_terminal:
            self._screen = PipedLine(stream)
        self._gap = FIRST_GAP_SECONDS
        self._next_show = 0.0  # the first step is always shown
        self._marks: deque[Mark] = deque(maxlen=25 if self._screen else 2)
        self._steps, self._samples, self._skipped = 0, 0.0, 0
        self._total: int | None = None
        self._done = 0
        self._last: tuple[int, int, float | None] | None = None  # index, epoch, loss of the newest step
        self._shown = -1  # value of _steps at the last show

    def plan(self, total_steps: int | None, done: int) -> None:
        """The loop that begins has so many steps, of which some were done before it was stopped."""
        self._show_last()
        self._total, self._done = total_steps, done
        self._marks.clear()
        if self._steps:  # the very first step pays for start-up and says nothing about the rate
            self._marks.append(Mark(self._clock(), self._steps, self._samples))

    def advance(self, index: int, epoch: int, loss: float | None, num_samples: float, skipped: bool) -> None:
        self._steps += 1
        self._samples += num_samples
        self._done += 1
        if skipped:
            self._skipped += 1
        self._last = (index, epoch, loss)
        now = self._clock()
        if now >= self._next_show or self._done == self._total:
            self._show(now)

    def say(self, text: str) -> None:
        if self._screen is not None:
            self._screen.print_above(text)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leaves the last step as a plain line, and the terminal as it was."""
        if self._screen is not None:
            self._screen.stop()
            self._screen = None
            self._shown = -1  # the live line is gone
        self._show_last()

    def _show_last(self) -> None:
        if self._last is not None and self._shown != self._steps:
            self._show(self._clock())

    def _show(self, now: float) -> None:
        if self._last is None:
            return
        index, epoch, loss = self._last
        position = Position(index + 1, self._total and index + 1 - self._done + self._total, epoch, loss, self._skipped)
        new = Mark(now, self._steps, self._samples)
        text = progress_text(
            position, self._marks[0] if self._marks else new, new, self._total and self._total - self._done
        )
        self._marks.append(new)
        self._shown = self._steps
        if self._screen is not None:
            self._screen.update(text)
            self._next_show = now + LIVE_SECONDS
        else:
            self.say(text)
            self._next_show = now + self._gap
            self._gap = min(2 * self._gap, LONGEST_GAP_SECONDS)


class PipedLine:
    """One line that `instep run` redraws at the bottom of its terminal; what ends with a carriage return is a state."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def update(self, text: str) -> None:
        self._stream.write(text + "\r")
        self._stream.flush()

    def print_above(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def stop(self) -> None:
        """The next line takes the place of the last state."""


class LiveLine:
    """One line that is redrawn in place; what the script prints on the terminal meanwhile goes above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Live | None = None

    def update(self, text: str) -> None:
        from rich.text import Text  # only here: a log needs no rich

        self._started().update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def print_above(self, text: str) -> None:
        if self._live is None:
            self._stream.write(text + "\n")
            self._stream.flush()
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _started(self) -> Live:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            screens: dict[str, Any] = {
                "redirect_stdout": is_terminal(sys.stdout),  # output piped elsewhere stays there
                "redirect_stderr": is_terminal(sys.stderr),
            }
            live = Live(console=Console(file=self._stream), auto_refresh=False, transient=True, **screens)
            live.start()
            self._live = live
        return self._live

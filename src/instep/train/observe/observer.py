"""What a run shows and keeps: progress, lines said on rank 0, metrics.jsonl and the trackers asked for."""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from instep.errors import UsageError
from instep.records.run_dir import RunDir
from instep.settings import read_setting
from instep.train.absent import check_there
from instep.train.observe.metrics_file import MetricsFile
from instep.train.observe.progress import Progress
from instep.train.observe.trackers import Tracker, open_trackers

OWN_NAMES = ("step", "epoch", "time", "seconds", "samples", "skipped", "nonfinite")
PLAIN = (bool, int, float, str)
MOST_BITS = 1023  # of a whole number that a float can hold too, as trackers want it


def check_loggable(name: str, value: object) -> None:
    """Raises UsageError for a name of ours and for a value that is no single thing."""
    if name in OWN_NAMES:
        raise UsageError(
            f"run.log({name}=...): {name!r} is written for every step already, as are {', '.join(OWN_NAMES)}. "
            "Choose another name."
        )
    check_there(value)
    if value is None or isinstance(value, PLAIN):
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise UsageError(
                f"run.log({name}=...) got a whole number of {value.bit_length()} bits; it takes at most {MOST_BITS}."
            )
        return
    if _num_elements(value) == 1 and _is_plain_kind(value):
        return
    count = _num_elements(value)
    if count == 1:
        raise UsageError(
            f"run.log({name}=...) got {getattr(value, 'dtype', type(value).__name__)}, which is no real number and no text."
        )
    what = f"a {type(value).__name__}" + ("" if count is None else f" of {count} elements")
    raise UsageError(
        f"run.log({name}=...) got {what}; it takes a number, a text, a bool, None or a tensor of one element."
    )


def _is_plain_kind(value: Any) -> bool:
    """Whether the element of a tensor or an array is a real number, a bool or a text, and is there."""
    kind = getattr(value.dtype, "kind", None) if hasattr(value, "dtype") else None
    if kind is not None:
        return kind in "biufU"
    return not getattr(value, "is_meta", False) and not (hasattr(value, "is_complex") and value.is_complex())


def _num_elements(value: Any) -> int | None:
    """Of a tensor or an array, whose `item()` gives the number; None for anything else."""
    if not hasattr(value, "item"):
        return None
    numel: Any = getattr(value, "numel", None)
    return numel() if numel is not None else getattr(value, "size", None)


class Observer:
    """Every rank has one and may call it; only rank 0's writes and prints.

    directory: where metrics.jsonl goes; None writes nothing. arguments: those of the run, for the trackers.
    """

    def __init__(
        self,
        *,
        directory: Path | None,
        is_main: bool,
        arguments: dict[str, Any],
        trackers: Sequence[str] = (),
        stream: TextIO | None = None,
    ) -> None:
        self._is_main = is_main
        self._said: set[str] = set()
        self._logged: dict[str, Any] = {}  # waits for the step that began
        self._record: dict[str, Any] | None = None  # the newest step's object
        self._sent = True  # whether the trackers have `_record`
        self._last_seconds = time.perf_counter()
        self._progress: Progress | None = None
        self._file: MetricsFile | None = None
        self._trackers: list[Tracker] = []
        if is_main:
            self._trackers = open_trackers(trackers, directory, arguments)
            self._progress = Progress(
                sys.stderr if stream is None else stream, piped_to_terminal=read_setting("live").value
            )
            if directory is not None:
                self._file = MetricsFile(RunDir(directory).metrics, on_failure=self.say)

    def plan(self, total_steps: int | None, done: int = 0) -> None:
        """A loop of `total_steps` begins, of which `done` were done before the run was stopped."""
        if self._progress is not None:
            self._progress.plan(total_steps, done)

    def rewind(self, step: int) -> None:
        """Forgets what an earlier run in this directory kept of steps from `step` on; called when a run is restored."""
        if self._file is not None:
            self._file.rewind(step)

    def begin(self, index: int) -> None:
        """Step `index` begins: what is logged from here on joins its object, no longer the one of the step before."""
        if self._record is not None and self._record["step"] != index:
            self._finish_record()

    def step(
        self,
        index: int,
        epoch: int,
        loss: float | None,
        grad_norm: float | None,
        learning_rate: float | None,
        num_samples: float,
        skipped: bool,
    ) -> None:
        """Once per optimizer step. A second call for the same step replaces what is given and adds no samples."""
        if self._progress is None:
            return
        now = time.perf_counter()
        record = {
            "step": index,
            "epoch": epoch,
            "time": round(time.time(), 3),
            "seconds": round(now - self._last_seconds, 6),
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "samples": num_samples,
            "skipped": skipped,
        }
        if self._record is not None and self._record["step"] == index:
            self._update_record(record)
            return
        self._last_seconds = now
        if self._logged:
            record.update(self._logged)
            self._logged.clear()
        if not self._sent:
            self._send()
        self._record = record
        self._sent = not self._trackers
        if self._file is not None:
            self._file.add(record)
        self._progress.advance(index, epoch, loss, num_samples, skipped)

    def log(self, metrics: dict[str, object]) -> None:
        """Joins the object of the step that is under way, or of the newest one after its update."""
        for name, value in metrics.items():
            check_loggable(name, value)  # on every rank, so that none goes on alone
        if not self._is_main:
            return
        record = self._logged if self._record is None else self._record
        for name, value in metrics.items():
            record[name] = value if value is None or isinstance(value, PLAIN) else value.item()  # type: ignore[attr-defined]
        if self._file is not None:
            self._file.flush_if_due()

    def say(self, text: str) -> None:
        """One line on rank 0; a line that was said before is not said again."""
        if self._progress is not None and text not in self._said:
            self._said.add(text)
            self._progress.say(f"instep: {text}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._is_main:
            builtins.print(*args, **kwargs)

    def flush(self) -> None:
        """What was measured so far survives SIGKILL from here on; called before what may take long."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """May be called twice."""
        if self._progress is not None:
            self._progress.close()
        self._finish_record()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _update_record(self, record: dict[str, Any]) -> None:
        assert self._record is not None
        for name in ("loss", "grad_norm", "learning_rate"):
            if record[name] is not None:
                self._record[name] = record[name]
        self._record["skipped"] = self._record["skipped"] and record["skipped"]

    def _finish_record(self) -> None:
        if not self._sent:
            self._send()
        self._record = None

    def _send(self) -> None:
        self._sent = True
        if self._record is None:
            return
        numbers = {
            name: float(value)
            for name, value in self._record.items()
            if isinstance(value, (int, float)) and name not in ("step", "time")
        }
        for tracker in self._trackers:
            tracker.log(self._record["step"], numbers)

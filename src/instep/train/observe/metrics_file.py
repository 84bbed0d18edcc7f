"""metrics.jsonl: one JSON object per step, in order, that outlives the process.

Objects are gathered in memory and written a few times a second, whole lines at a time and straight to the operating
system, so that what was written survives SIGKILL. The newest object is written too, and written over while it grows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.errors import UsageError

FLUSH_SECONDS = 0.25  # the promise is a second; the rest is for steps that take long themselves

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def as_line(record: dict[str, Any]) -> str:
    """One line of valid JSON. A number that is not finite becomes null and is named under "nonfinite"."""
    try:
        return _encode(record) + "\n"
    except ValueError:
        notes = {name: str(value) for name, value in record.items() if _is_nonfinite(value)}
        finite = {name: None if name in notes else value for name, value in record.items()}
        return _encode({**finite, "nonfinite": notes}) + "\n"


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def lines_before(content: bytes, step: int) -> int:
    """How many leading bytes of the file belong to steps before `step`; a torn last line does not count."""
    end = content.rfind(b"\n") + 1
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        found = _step_of(content[start:end])
        if found is not None and found < step:
            return end
        end = start
    return 0


def _step_of(line: bytes) -> int | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else None


class MetricsFile:
    """`record` is the newest object; it may be added to until the next `add`.

    Raises UsageError when the file cannot be opened. `on_failure` is told once when it cannot be written any more.
    """

    def __init__(
        self, path: Path, on_failure: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._file = path.open("r+b", buffering=0)
        except OSError as error:
            raise UsageError(
                f"metrics cannot be written to {path}: {error.strerror}. Give Run(dir=...) a directory that can be "
                "written, or leave dir out and nothing is written."
            ) from None
        self._path = path
        self._on_failure = on_failure
        self._clock = clock
        self._end: int | None = None  # where the objects in memory go; unknown until the first step or a rewind
        self._closed: list[dict[str, Any]] = []  # made text when written: one burst is cheaper than many steps
        self._next_flush = 0.0
        self._failed = False
        self.record: dict[str, Any] | None = None

    def rewind(self, step: int) -> None:
        """Drops what is kept of steps from `step` on."""
        self._closed.clear()
        self.record = None
        self._file.seek(0)
        self._end = lines_before(self._file.readall(), step)
        self._file.truncate(self._end)

    def add(self, record: dict[str, Any]) -> None:
        if self._end is None:
            self.rewind(record["step"])
        elif self.record is not None:
            self._closed.append(self.record)
        self.record = record
        self.flush_if_due()

    def flush_if_due(self) -> None:
        if self._clock() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Hands everything to the operating system, the newest object as it stands."""
        self._next_flush = self._clock() + FLUSH_SECONDS
        if self._end is None or self._failed:
            return
        closed = "".join(map(as_line, self._closed)).encode()
        text = closed + (as_line(self.record).encode() if self.record is not None else b"")
        try:
            self._write(self._end, text)
        except OSError as error:
            self._failed = True
            self._on_failure(f"{self._path} cannot be written any more ({error.strerror}); training goes on without it")
        self._end += len(closed)
        self._closed.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _write(self, position: int, text: bytes) -> None:
        self._file.seek(position)
        rest = memoryview(text)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        # the newest object may have become shorter, when a logged value took the place of a measured one
        self._file.truncate()

"""The events file of this rank, written a whole line at a time so that a killed rank leaves whole lines."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from instep.records.event import write_line

MOST_OF_A_KIND = 300  # a note that repeats each step must not fill the disk


class EventLog:
    """Appends events; a disk that is full or gone costs the events and nothing else."""

    def __init__(self, path: Path) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.lost = 0
        self.step = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:
            self._file = -1

    def note(self, name: str, /, **facts: Any) -> bool:
        """Writes one event; False when this kind has been written often enough or it could not be written."""
        self._counts[name] += 1
        if self._counts[name] > (MOST_OF_A_KIND if name != "site" else 5000) or self._file < 0:
            return False
        line = write_line(name, time.monotonic(), self.step, facts)
        try:
            return os.write(self._file, line) == len(line)
        except OSError:
            self.lost += 1
            return False

    def forget(self) -> None:
        """For a forked child, which is not this rank."""
        self._file = -1

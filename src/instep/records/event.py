"""What a rank noted on its way: one JSON object per line of its events file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """name: what happened; time: seconds of the monotonic clock, which all processes of a machine share."""

    name: str
    time: float
    step: int
    facts: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.facts.get(key, default)


def write_line(name: str, time: float, step: int, facts: dict[str, Any]) -> bytes:
    return json.dumps({"event": name, "t": round(time, 6), "step": step, **facts}, default=str).encode() + b"\n"


def read_events(path: Path) -> list[Event]:
    """Events of a file, oldest first; a half-written last line is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return [event for line in lines if line and (event := _read_line(line)) is not None]


def _read_line(line: bytes) -> Event | None:
    try:
        data = json.loads(line)
        return Event(data.pop("event"), data.pop("t"), data.pop("step"), data)
    except (ValueError, KeyError, AttributeError):
        return None

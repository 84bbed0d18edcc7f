"""Calls on a stack, as a snapshot, a printed traceback or faulthandler gives them, and whose code they are of."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.records import recording as layout
from instep.records.finding import CallSite

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_TRACED = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')


@dataclass(frozen=True)
class Frame:
    """One call on a stack. own: of the user's code."""

    file: str
    line: int
    name: str
    own: bool = True

    @property
    def site(self) -> CallSite:
        return CallSite(self.file, self.line, source_line(self.file, self.line))


def source_line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def is_own(file: str) -> bool:
    """Whether a file in a stack is the user's, judged by its path alone."""
    return not (re.search(r"/(site|dist)-packages/|/lib(64)?/python\d|^<", file) or _is_ours(file))


def _is_ours(file: str) -> bool:
    """Whether it is a file of this package, wherever that was installed when the run was recorded."""
    _, found, inside = file.rpartition("/instep/")
    return bool(found) and "/" in inside and (Path(layout.__file__).parent.parent / inside).is_file()


def is_worker(stack: tuple[Frame, ...]) -> bool:
    """Whether it is of a worker process of a data loader."""
    return any(frame.name == "_worker_loop" for frame in stack)


def frame_of(row: dict[str, Any]) -> Frame:
    return Frame(row["file"], row["line"], row["name"], row.get("own", True))


def own_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if frame.own)


def frames_of_dump(text: str) -> tuple[Frame, ...]:
    """The main thread's part of what faulthandler wrote: the last stack that has a line of the user's, else the last."""
    stacks: list[tuple[Frame, ...]] = []
    for part in text.split("\n\n"):
        rows = [Frame(m["file"], int(m["line"]), m["name"], is_own(m["file"])) for m in _FRAME.finditer(part)]
        if rows:
            stacks.append(tuple(rows))
    with_own = [stack for stack in stacks if any(frame.own for frame in stack)]
    return (with_own or stacks or [()])[-1]


def stacks_of_dump(text: str) -> list[tuple[Frame, ...]]:
    """Of each thread of each process that wrote to it, in the order of writing."""
    return [frames_of_dump(part) for part in _THREAD.split(text) if "File" in part]


def frames_of_text(text: str) -> list[dict[str, Any]]:
    """The user's frames of a printed traceback, innermost first."""
    tail = text.rpartition("Traceback (most recent call last)")[2]
    found = [m for m in _TRACED.finditer(tail) if is_own(m["file"])]
    return [{"file": m["file"], "line": int(m["line"]), "name": m["name"]} for m in reversed(found)]

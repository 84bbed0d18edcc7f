"""Where in the user's code we are: the innermost frame of a file that is not Python's, torch's, a package's or ours."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import CodeType, FrameType
from typing import Any

from instep.launch.probe.event_log import EventLog

_PATHS = sysconfig.get_paths()
_FOREIGN = tuple(
    {os.path.join(_PATHS[key], "") for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))), "instep", ""), "<"}
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MOST_CODES = 20_000  # a script that makes new functions in each step must not fill the memory


def is_users_file(filename: str) -> bool:
    return not filename.startswith(_FOREIGN) and not any(part in filename for part in _PACKAGES)


class Sites:
    """Numbers the lines of the user's code from which something was called; each is noted once in the events.

    Code objects are known by their address: to hash one goes through all its constants and names. They are kept, so
    that no other can have the same address.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._codes: list[CodeType] = []
        self._known: dict[int, dict[int, int] | None] = {}  # by code: numbers by instruction; None for foreign code
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._lock = threading.RLock()  # a signal handler of the script may come in between

    def here(self, skip: int = 1) -> int:
        """Number of the user's line that led here; 0 when there is none. Costs about 0.2 us."""
        return self.of_frame(sys._getframe(skip + 1))

    def of_frame(self, frame: FrameType | None) -> int:
        """The same for the innermost frame of the user's from this one on."""
        known = self._known
        while frame is not None:
            code = frame.f_code
            try:
                numbers = known[id(code)]
            except KeyError:
                numbers = self._learn(code)
            if numbers is not None:
                number = numbers.get(frame.f_lasti)
                return number if number is not None else self._add(code, numbers, frame)
            frame = frame.f_back
        return 0

    def _learn(self, code: CodeType) -> dict[int, int] | None:
        with self._lock:
            if len(self._codes) >= _MOST_CODES:
                self._known.clear()
                self._codes.clear()
            self._codes.append(code)
            numbers = self._known[id(code)] = {} if is_users_file(code.co_filename) else None
        return numbers

    def _add(self, code: CodeType, numbers: dict[int, int], frame: FrameType) -> int:
        line = frame.f_lineno
        with self._lock:
            count = len(self._numbers)
            number = self._numbers.setdefault((code.co_filename, code.co_name, line), count + 1)
            numbers[frame.f_lasti] = number
        if number > count:
            self._log.note("site", id=number, file=os.path.abspath(code.co_filename), line=line, name=code.co_name)
        return number


def user_stack(frame: FrameType | None, most: int = 30) -> list[dict[str, Any]]:
    """The frames of a stack, innermost first, each marked as the user's or not; outer foreign frames are left out."""
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < 200:
        name = frame.f_code.co_filename
        frames.append({"file": name, "line": frame.f_lineno, "name": frame.f_code.co_name, "own": is_users_file(name)})
        frame = frame.f_back
    last = max((i for i, one in enumerate(frames) if one["own"]), default=len(frames) - 1)
    return frames[: last + 1][:most] if last < most else frames[:8] + [f for f in frames[8 : last + 1] if f["own"]]

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


def is_users_file(filename: str) -> bool:
    return not filename.startswith(_FOREIGN) and not any(part in filename for part in _PACKAGES)


class Sites:
    """Numbers the lines of the user's code from which something was called; each is noted once in the events."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._is_users: dict[CodeType, bool] = {}
        self._numbers: dict[tuple[CodeType, int], int] = {}
        self._lock = threading.Lock()

    def here(self, skip: int = 1) -> int:
        """Number of the user's line that led here; 0 when there is none. Costs about 0.3 us."""
        frame: FrameType | None = sys._getframe(skip + 1)
        while frame is not None:
            code = frame.f_code
            users = self._is_users.get(code)
            if users is None:
                users = self._is_users[code] = is_users_file(code.co_filename)
            if users:
                number = self._numbers.get((code, frame.f_lineno))
                return number if number is not None else self._add(code, frame.f_lineno, frame)
            frame = frame.f_back
        return 0

    def _add(self, code: CodeType, line: int, frame: FrameType) -> int:
        with self._lock:
            number = self._numbers.setdefault((code, line), len(self._numbers) + 1)
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

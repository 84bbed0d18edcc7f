"""The line of the user's code that is running, for messages."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch

from instep.records.finding import CallSite

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def user_call_site() -> CallSite | None:
    """The innermost line outside instep and torch. In a backward thread: the line at which the main thread waits."""
    site = _outside(sys._getframe(1))
    if site is None and threading.current_thread() is not threading.main_thread():
        main = threading.main_thread().ident
        site = _outside(sys._current_frames().get(main)) if main is not None else None
    return site


def is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith((_OURS, _TORCH, "<")) and "/contextlib.py" not in name


def site_at(frame: FrameType, line: int) -> CallSite:
    file = frame.f_code.co_filename
    return CallSite(file, line, linecache.getline(file, line).strip())


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Those that an error has come through, outermost first, with the line in each."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def site_of(error: BaseException) -> CallSite | None:
    """The innermost line of the user's that an error has come through."""
    return next((site_at(frame, line) for frame, line in reversed(list(frames_of(error))) if is_users(frame)), None)


def say_site(site: CallSite | None) -> str:
    """` at train.py:41 (loss = f(x))`, or nothing without a line."""
    return f" at {os.path.basename(site.file)}:{site.line} ({site.source})" if site else ""


def _outside(frame: FrameType | None) -> CallSite | None:
    while frame is not None:
        if is_users(frame):
            return site_at(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def at_line() -> str:
    """` at train.py:41`, or nothing when no line of the user's code is on the stack."""
    site = user_call_site()
    return f" at {os.path.basename(site.file)}:{site.line}" if site else ""

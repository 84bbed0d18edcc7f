"""The thread that shows from inside that the rank lives, and answers when the launcher asks for a snapshot."""

from __future__ import annotations

import atexit
import json
import mmap
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from instep.launch.probe import flight
from instep.launch.probe.exits import handled_error
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.sites import is_users_file, user_stack
from instep.launch.probe.standing import Standing
from instep.records import recording as layout
from instep.records.run_dir import write_json

_EVERY_SECONDS = 0.2
_END_SECONDS = 2.0
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch/_dynamo/", "torch/_inductor/")


class Watcher:
    """Started when the script first speaks of other ranks; before that there is nobody to wait for."""

    def __init__(self, recorder: Recorder, snapshot: Path) -> None:
        self._recorder = recorder
        self._snapshot = snapshot
        self._thread: threading.Thread | None = None
        self._last_call: tuple[int, int] = (0, 0)
        self._standing = Standing(recorder)
        self._forwards = self._marks = 0
        self._lines: Counter[tuple[str, int]] = Counter()
        self._num_lines = 0
        self._stop = threading.Lock()  # given back at the end; to wait for a lock with a timeout needs no Python code
        self._stop.acquire()
        atexit.register(self._end)

    def start(self) -> None:
        if self._thread is None:
            layout.F64.pack_into(self._recorder.page, layout.BEAT, time.monotonic())  # before anything may hold it up
            self._recorder.is_watched = True
            self._thread = threading.Thread(target=self._run, name="instep-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.acquire(timeout=_EVERY_SECONDS):
            self._look()
            self._answer()

    def _end(self) -> None:
        """Before the interpreter goes: a thread that comes back from C++ into an interpreter that has ended can hang it."""
        self._stop.release()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        self._recorder.is_watched = False  # nobody else writes what waits to be written
        self._recorder.flush()
        self._note_lines()

    @contained
    def _look(self) -> None:
        """While marks come in, nobody asks what the rank waits for: then only that it lives is shown."""
        self._recorder.flush()
        frame = sys._current_frames().get(self._recorder.main_thread or 0)
        if self._recorder.only_counts:
            self._standing.look(frame)
        page, marks = self._recorder.page, self._recorder.num_marks
        layout.F64.pack_into(page, layout.BEAT, time.monotonic())
        if marks == self._marks:
            self._look_closely(page, frame)
        else:
            self._marks = marks
            layout.I64.pack_into(page, layout.LAST_COMPLETED, layout.I64.unpack_from(page, layout.LAST_ENQUEUED)[0])
            layout.U64.pack_into(page, layout.COMPILING, 0)
        self._count_line(frame)
        if self._recorder.sample_stack is not None:
            self._recorder.sample_stack(frame)

    def _look_closely(self, page: mmap.mmap | bytearray, frame: FrameType | None) -> None:
        status = flight.read_status()
        if status is not None:
            layout.I64.pack_into(page, layout.LAST_ENQUEUED, status[0])
            layout.I64.pack_into(page, layout.LAST_COMPLETED, status[1])
        self._sample(frame)
        # Only where no rank waits for a device in a line of its own.
        elsewhere = frame is not None and not is_torchs(frame) and not flight.has_device_groups()
        layout.U64.pack_into(page, layout.ELSEWHERE, int(elsewhere))

    def _count_line(self, frame: FrameType | None) -> None:
        """Where the rank's own time goes, by the user's lines: samples taken while it is in no collective."""
        if self._recorder.waits or not self._recorder.num_steps:
            return
        while frame is not None and not is_users_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            line = os.path.abspath(frame.f_code.co_filename), frame.f_lineno
            self._lines[line] += 1
            self._recorder.seen_lines.append((time.monotonic(), *line))
            self._num_lines += 1
            if self._num_lines % 200 == 0:
                self._note_lines()

    @contained
    def _note_lines(self) -> None:
        top = [[file, line, count] for (file, line), count in self._lines.most_common(6)]
        if top:
            self._recorder.log.note("lines", total=self._num_lines, top=top)

    def _sample(self, frame: FrameType | None) -> None:
        """Notices module calls that no wrapper sees, and compilers at work, from the stack of the main thread."""
        compiling, call = 0, (0, 0)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "_call_impl" and not call[0]:
                call = (id(frame), frame.f_lasti)
            elif any(part in code.co_filename for part in _COMPILERS[2:]) and code.co_name in (
                "_compile",
                "compile_fx",
            ):
                compiling = 1
            frame = frame.f_back
        if call[0] and call != self._last_call:
            self._forwards += 1
            layout.U64.pack_into(self._recorder.page, layout.FORWARDS_SEEN, self._forwards)
        self._last_call = call
        layout.U64.pack_into(self._recorder.page, layout.COMPILING, compiling)

    @contained
    def _answer(self) -> None:
        page = self._recorder.page
        request = layout.U64.unpack_from(page, layout.REQUEST)[0]
        if request != layout.U64.unpack_from(page, layout.ANSWER)[0]:
            self.write_snapshot()
            layout.U64.pack_into(page, layout.ANSWER, request)

    def write_snapshot(self) -> None:
        write_json(self._snapshot, take_snapshot(self._recorder))


def is_torchs(frame: FrameType) -> bool:
    return f"{os.sep}torch{os.sep}" in frame.f_code.co_filename


def take_snapshot(recorder: Recorder) -> dict[str, Any]:
    """Where every thread is, and the newest collectives."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    threads = [
        {"name": names.get(ident, "?"), "main": ident == recorder.main_thread, "frames": user_stack(frame)}
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    collectives = flight.read_entries()
    json.dumps(collectives)  # sizes of symbolic shape would fail here, not in the file
    return {
        "time": time.monotonic(),
        "threads": threads,
        "collectives": collectives,
        "groups": flight.read_groups(),
        "handling": contained(handled_error)(recorder.main_thread),
    }

"""The hands of `output.py`: reads the ranks' pipes, keeps full logs, writes to the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from instep.launch.output import LineAssembler, fit_to_terminal

_CHUNK = 1 << 16
_DRAW_SECONDS = 0.1  # between two states of a progress bar on a terminal
_WRITE_SECONDS = 0.2  # between two looks whether the run has to end, while the output is not taken
_ERASE = b"\r\x1b[K"


@dataclass(eq=False)
class Stream:
    """One pipe from a rank. target: 1 or 2, our stream to print on, or None to keep it in files only."""

    pipe: int
    target: int | None
    lines: LineAssembler
    files: list[Log] = field(default_factory=list["Log"])
    filtered: tuple[bytes, ...] = ()
    filter_file: Log | None = None


class Console:
    """All streams of the ranks that run now."""

    def __init__(self, selector: selectors.BaseSelector, is_hurried: Callable[[], bool]) -> None:
        """is_hurried: whether the run has to end, for which output that nobody takes is dropped."""
        self.selector = selector
        self.is_hurried = is_hurried
        self.streams: set[Stream] = set()
        self.merged = _is_same_file(1, 2)
        self.on_terminal = {target: is_live_terminal(target) for target in (1, 2)}
        self._drawn = b""  # the newest progress bar, at the bottom of the terminal
        self._drawn_at = 0.0

    def add(self, stream: Stream) -> None:
        os.set_blocking(stream.pipe, False)
        self.streams.add(stream)
        self.selector.register(stream.pipe, selectors.EVENT_READ, self._reader(stream))

    def assembler(self, prefix: bytes) -> LineAssembler:
        return LineAssembler(prefix, holds_bars=self.on_terminal[2])

    def _reader(self, stream: Stream):
        return lambda: self.read(stream)

    def read(self, stream: Stream) -> bool:
        """Takes what is in the pipe now, at most one chunk. Returns whether there may be more."""
        try:
            data = os.read(stream.pipe, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._end(stream)
            return False
        for file in stream.files:
            file.write(data)
        now = time.monotonic()
        self._show(stream, stream.lines.feed(data, now))
        if now - self._drawn_at >= _DRAW_SECONDS:
            self._draw(now)
        return True

    def tick(self) -> None:
        """Shows beginnings of lines and progress bars that have waited long enough."""
        now = time.monotonic()
        for stream in self.streams:
            self._show(stream, stream.lines.idle(now))
        self._draw(now)

    def drain(self) -> None:
        """Reads what is left after the ranks' end. A descendant that keeps a pipe open is not waited for."""
        for stream in list(self.streams):
            while self.read(stream):
                pass
            if stream in self.streams:
                self._end(stream)

    def say(self, text: str) -> None:
        """A line of the launcher itself, on stderr."""
        self._put(2, b"".join(b"instep: " + line.encode() + b"\n" for line in text.splitlines()))

    def print_raw(self, text: str) -> None:
        self._put(2, text.encode(errors="replace"))

    def _end(self, stream: Stream) -> None:
        self._show(stream, stream.lines.close())
        self.streams.discard(stream)
        self.selector.unregister(stream.pipe)
        os.close(stream.pipe)
        for file in (*stream.files, stream.filter_file):
            if file is not None:
                file.close()

    def _show(self, stream: Stream, data: bytes) -> None:
        if data and stream.target is not None:
            self._put(stream.target, data)
        if data and stream.filter_file is not None:
            for line in data.splitlines(keepends=True):
                if any(needle in line for needle in stream.filtered):
                    stream.filter_file.write(line)

    def _put(self, target: int, data: bytes) -> None:
        """Prints above the progress bar, which comes back with the next look."""
        if self._drawn and self.on_terminal[target]:
            data, self._drawn = _ERASE + data, b""
        self._write(target, data)

    def _draw(self, now: float) -> None:
        """The newest state of the first rank's progress bar, in place."""
        if not self.on_terminal[2]:
            return
        bars = [(s.lines.prefix, s.lines.bar) for s in self.streams if s.lines.bar and s.target is not None]
        text = b"".join(min(bars, default=(b"", b"")))
        text = fit_to_terminal(text, os.get_terminal_size(2).columns or 80) if text else text
        if text != self._drawn:
            self._write(2, _ERASE + text)
            self._drawn, self._drawn_at = text, now

    def _write(self, target: int, data: bytes) -> None:
        """All of it, however slowly it is taken; the rest goes nowhere when nobody reads any more (as after `| head`)."""
        view = memoryview(data)
        while view:
            # What is writable takes this much without blocking, so that no signal has to wait for a reader.
            if not select.select([], [target], [], _WRITE_SECONDS)[1]:
                if self.is_hurried():
                    return
                continue
            try:
                view = view[os.write(target, view[: select.PIPE_BUF]) :]
            except BlockingIOError:  # not ours to make it blocking: others share it
                time.sleep(0.001)
            except BrokenPipeError:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, target)  # the run goes on, and the interpreter's last flush finds where to write
                os.close(nowhere)
                return


def is_live_terminal(target: int) -> bool:
    return os.isatty(target) and os.environ.get("TERM") != "dumb"


class Log:
    """A file that output is kept in; a disk that is full or gone costs what is kept, never the run."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115  # as long as the rank writes

    def write(self, data: bytes) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # room may come back, so that later lines are tried again
                self.file.write(data)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False

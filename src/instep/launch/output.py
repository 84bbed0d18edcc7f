"""Makes one readable stream of the output of many ranks: whole lines, each with its rank, never mixed.

Pure: bytes and times in, bytes to print out; who reads pipes and writes terminals is `console.py`.
"""

from __future__ import annotations

import re

UNFINISHED_SECONDS = 2.0  # silence after which the beginning of a line is shown as it is
PROGRESS_SECONDS = 10.0  # between two states of a progress bar in a log
LONGEST_LINE_BYTES = 1 << 20  # a line without end is cut here, so that memory stays bounded


class LineAssembler:
    """One stream of one rank. A progress bar (`\\r`) shows its newest state from time to time and its last one.

    holds_bars: on a terminal, where the newest state is drawn in place from `bar`, no state but the last becomes a line.
    """

    def __init__(self, prefix: bytes, progress_seconds: float = PROGRESS_SECONDS, holds_bars: bool = False) -> None:
        self.prefix = prefix
        self.progress_seconds = progress_seconds
        self.holds_bars = holds_bars
        self.pending = b""  # the line that has no end yet, of a progress bar only what counts
        self.bar = b""  # the newest full state of a progress bar that was not shown yet
        self.shown = b""  # the state that was shown last, which is not shown again as the end of its line
        self.changed_at = 0.0
        self.bar_shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> bytes:
        """What can be printed after these bytes: whole lines, each with the prefix."""
        self.changed_at = now
        if b"\r" not in data and b"\r" not in self.pending and not self.bar:
            return self._plain(data)
        out: list[bytes] = []
        *lines, rest = (self.pending + data).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            text = (_last_state(line) if b"\r" in line else line) or self.bar
            if not self.shown or text not in (b"", self.shown):
                out.append(self._line(text))
            self.bar = self.shown = b""
        self._hold(rest)
        return b"".join(out) + self._progress(now)

    def idle(self, now: float) -> bytes:
        """What should not wait any longer for the end of its line."""
        if self.bar:
            return self._progress(now)
        if self.pending and now - self.changed_at >= UNFINISHED_SECONDS:
            text = _last_state(self.pending)
            if text != self.shown:
                self.pending = b""
                return self._line(text) if text else b""
        return b""

    def close(self) -> bytes:
        """The rest, at the end of the stream."""
        text = _last_state(self.pending) or self.bar
        ended = bool(text) and text != self.shown
        self.pending = self.bar = self.shown = b""
        return self._line(text) if ended else b""

    def _plain(self, data: bytes) -> bytes:
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self.pending += data
            if len(self.pending) < LONGEST_LINE_BYTES:
                return b""
            text, self.pending = self.pending, b""
            return self._line(text)
        text, self.pending = self.pending + head, rest
        return self._line(text.replace(b"\n", b"\n" + self.prefix)) if self.prefix else text + b"\n"

    def _hold(self, rest: bytes) -> None:
        before, carriage, last = rest.rpartition(b"\r")
        if not carriage:
            self.pending = rest[-LONGEST_LINE_BYTES:]
            return
        # `\r` ends a state for some programs and begins one for others; what follows it is the newest.
        self.bar = last or _last_state(before) or self.bar
        self.pending = b"\r" + last

    def _progress(self, now: float) -> bytes:
        if not self.bar or self.holds_bars or now - self.bar_shown_at < self.progress_seconds:
            return b""
        self.shown, self.bar, self.bar_shown_at = self.bar, b"", now
        return self._line(self.shown)

    def _line(self, text: bytes) -> bytes:
        return self.prefix + text + b"\n"


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of a line that was overwritten."""
    states = [part for part in line.split(b"\r") if part.strip()]
    return states[-1] if states else b""


def fit_to_terminal(text: bytes, num_columns: int) -> bytes:
    """The state of a progress bar as one line of so many columns, without movements of the cursor."""
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", text).decode(errors="replace")
    return "".join(c for c in plain if c.isprintable())[: max(0, num_columns - 1)].encode()


def make_prefix(rank: int, num_ranks: int) -> bytes:
    """`[3] `, as wide for every rank; nothing for a single rank, which needs no name."""
    return b"" if num_ranks < 2 else f"[{rank:>{len(str(num_ranks - 1))}}] ".encode()

"""One connection to the launcher of another node, with a thread that reads and one that writes.

The launcher's own loop never waits for a network, and a node that is busy printing or judging still beats.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from instep.launch.link.wire import LineReader, Refused, write_message

BEAT_SECONDS = 1.0
_READ_BYTES = 1 << 16
_JOIN_SECONDS = 2.0

Hear = Callable[["Connection", dict[str, Any]], None]


class Connection:
    """hear: called from the reading thread with each message but beats; end: None while it lives, `bye` or `again` (for a
    new attempt) after a word of parting, else why it broke off. heard_at: monotonic."""

    def __init__(
        self, channel: socket.socket, hear: Hear, reader: LineReader, early: Iterable[dict[str, Any]] = ()
    ) -> None:
        self.channel = channel
        self.hear = hear
        self.reader = reader
        self._early = early  # read with the first message
        self.node: int | None = None  # once it has said who it is
        self.heard_at = time.monotonic()
        self.end: str | None = None
        self._outgoing: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name="instep-link", daemon=True) for target in (self._read, self._write)
        ]

    def start(self) -> None:
        self.channel.settimeout(None)
        self.channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for thread in self._threads:
            thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Comes back at once; a connection that has ended takes it and does nothing."""
        self._outgoing.put(message)

    def part(self, word: str) -> None:
        """Says goodbye, and no more after it; does not wait."""
        self.send({"do": "bye", "word": word})
        self._outgoing.put(None)

    def refuse(self, why: str) -> None:
        """Ends it at once."""
        self.end = self.end or why
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After what was sent has gone out, or after a short time."""
        self._outgoing.put(None)
        self._threads[1].join(_JOIN_SECONDS)
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self.channel.close()

    def _write(self) -> None:
        while True:
            try:
                message = self._outgoing.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                message = {"do": "beat"}
            if message is None:
                with contextlib.suppress(OSError):
                    self.channel.shutdown(socket.SHUT_WR)
                return
            try:
                self.channel.sendall(write_message(message))
            except OSError:  # the reading thread sees the end too, and says it
                return

    def _read(self) -> None:
        why = "its connection has closed"
        try:
            for message in self._early:
                self._take(message)
            while data := self.channel.recv(_READ_BYTES):
                self.heard_at = time.monotonic()
                for message in self.reader.feed(data):
                    self._take(message)
        except OSError as error:
            why = error.strerror or str(error)
        except Refused as error:
            why = f"it sent {error}"
        self.refuse(why)

    def _take(self, message: dict[str, Any]) -> None:
        if message["do"] == "bye":
            self.end = "again" if message.get("word") == "again" else "bye"
        elif message["do"] != "beat":
            self.hear(self, message)

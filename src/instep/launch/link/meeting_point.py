"""How launchers find each other: the first node listens, the others come with the token of the run.

The token and the port travel through the store in which torch's agents meet. It is opened only where several nodes were
asked for, and on the address that the ranks are told to meet at.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import threading
from typing import Any

from instep.launch.link.connection import Connection, Hear
from instep.launch.link.wire import MOST_LINE_BYTES, LineReader, Refused

MOST_HELLO_BYTES = 1 << 16
_MOST_STRANGERS = 64  # connections that have not said the token yet
_HELLO_SECONDS = 5.0
_CONNECT_SECONDS = 5.0


class MeetingPoint:
    """Where the first node listens. arrive: called from a thread with a connection that knows the token, and its hello;
    what it says later goes to `hear`."""

    def __init__(self, host: str, arrive: Hear, hear: Hear) -> None:
        self.token = secrets.token_hex(16)
        self.arrive = arrive
        self.hear = hear
        self.server = listen_at(host)
        self.port: int = self.server.getsockname()[1]
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._thread = threading.Thread(target=self._accept, name="instep-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.server.close()
        self._thread.join(2.0)

    def _accept(self) -> None:
        while True:
            try:
                channel, _ = self.server.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                channel.close()
                continue
            threading.Thread(target=self._greet, args=(channel,), name="instep-link", daemon=True).start()

    def _greet(self, channel: socket.socket) -> None:
        reader = LineReader(MOST_HELLO_BYTES)
        try:
            told = read_hello(channel, reader)
        finally:
            self._strangers.release()
        if told is None or not hmac.compare_digest(str(told[0].get("token", "")).encode(), self.token.encode()):
            channel.close()
            return
        reader.most_bytes = MOST_LINE_BYTES
        self.arrive(Connection(channel, self.hear, reader, told[1:]), told[0])


def read_hello(channel: socket.socket, reader: LineReader) -> list[dict[str, Any]] | None:
    """The first message, a hello, and what came with it; None from a stranger."""
    channel.settimeout(_HELLO_SECONDS)
    try:
        while data := channel.recv(4096):
            messages = reader.feed(data)
            if messages:
                return messages if messages[0]["do"] == "hello" else None
    except (OSError, Refused):
        return None
    return None


def listen_at(host: str) -> socket.socket:
    """Bound to the address when it is one of this machine's, else (a name, or an address behind a gateway) to all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for address in (_own_address(host), "::" if family == socket.AF_INET6 else "0.0.0.0"):
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            if address is not None:
                server.bind((address, 0))
                server.listen(1024)
                return server
        except OSError:
            server.close()
            continue
        server.close()
    raise OSError(0, "no address to listen at", host)


def _own_address(host: str) -> str | None:
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def come(host: str, port: int, hello: dict[str, Any], hear: Hear) -> Connection:
    """Goes to the first node. Raises OSError."""
    channel = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    connection = Connection(channel, hear, LineReader())
    connection.node = 0
    connection.send(hello)
    return connection

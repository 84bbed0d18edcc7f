"""Messages between the launcher's processes: JSON objects, with open files if need be, over a Unix socket."""

from __future__ import annotations

import array
import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!IB")  # length of the JSON text, number of files that come with it
_MOST_FILES = 16


class Closed(Exception):
    """The other side has closed the channel, most likely because its process ended."""


def open_channel() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def send(channel: socket.socket, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
    """Raises Closed when nobody is there to read it."""
    text = json.dumps(message).encode()
    header = _HEADER.pack(len(text), len(files))
    try:
        if files:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
            sent = channel.sendmsg([header], rights)  # the files travel with the first byte of the header
            channel.sendall(header[sent:] + text)
        else:
            channel.sendall(header + text)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its files, waiting for it. Raises Closed at the end."""
    header, files = _read_header(channel)
    length, _ = _HEADER.unpack(header)
    return json.loads(_read(channel, length)), files


def _read_header(channel: socket.socket) -> tuple[bytes, list[int]]:
    data, files = b"", []
    while len(data) < _HEADER.size:
        try:
            part, more, _, _ = socket.recv_fds(channel, _HEADER.size - len(data), _MOST_FILES)
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("end of the channel")
        data += part
        files += more
    return data, files


def _read(channel: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        try:
            part = channel.recv(min(length, 1 << 20))
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("end of the channel")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)

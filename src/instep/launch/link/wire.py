"""What launchers of several nodes say to each other: one JSON object a line, of limited size, and files by fixed names.

Nothing that is received is run or unpickled; a line that is too long, or is no such object, ends the connection.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from pathlib import Path
from typing import Any

from instep.records.run_dir import RankDir

MOST_LINE_BYTES = 8 << 20
MOST_FILE_BYTES = 4 << 20  # of a longer one only the end is sent; events come to some hundred kilobytes
# The files of a rank that are sent, by the names that `RankDir` gives them.
RANK_FILES = ("page", "events", "snapshot", "stacks", "failure", "crash", "mispaired_page")


class Refused(Exception):
    """The other side sent what no launcher sends."""


class LineReader:
    """Bytes in, messages out."""

    def __init__(self, most_bytes: int = MOST_LINE_BYTES) -> None:
        self.most_bytes = most_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Raises Refused."""
        found: list[dict[str, Any]] = []
        *whole, rest = data.split(b"\n")
        for part in whole:
            found.append(_read_message(bytes(self._data) + part, self.most_bytes))
            self._data.clear()
        self._data += rest
        if len(self._data) > self.most_bytes:
            raise Refused(f"a line of more than {self.most_bytes} bytes")
        return found


def _read_message(line: bytes, most_bytes: int) -> dict[str, Any]:
    if len(line) > most_bytes:
        raise Refused(f"a line of {len(line)} bytes")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused("a line that is no JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("do"), str):
        raise Refused("a line that is no message")
    return message


def write_message(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def rank_file(paths: RankDir, name: str) -> Path:
    """Raises Refused for a name that is none of ours."""
    if name not in RANK_FILES:
        raise Refused(f"a file named {name!r}")
    return getattr(paths, name)


def pack_file(path: Path) -> str | None:
    """A file as text, of a long one the end, from the beginning of a line; None when it is not there or empty."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MOST_FILE_BYTES))
            data = file.read(MOST_FILE_BYTES)
    except OSError:
        return None
    if size > MOST_FILE_BYTES:
        data = data[data.find(b"\n") + 1 :]
    return base64.b64encode(zlib.compress(data, 1)).decode() if data else None


def unpack_file(text: object) -> bytes:
    """What `pack_file` packed. Raises Refused, for what would become too large too."""
    if not isinstance(text, str):
        raise Refused("a file that is no text")
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text, validate=True), MOST_FILE_BYTES)
    except (zlib.error, binascii.Error, ValueError) as error:
        raise Refused("a file that cannot be unpacked") from error
    if unpacker.unconsumed_tail:
        raise Refused(f"a file of more than {MOST_FILE_BYTES} bytes")
    return data

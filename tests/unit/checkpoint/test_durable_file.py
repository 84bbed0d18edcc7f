"""What is written durably is what was given, whether past the page cache or through it."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest
import torch

from instep.train.checkpoint import durable_file
from instep.train.checkpoint.durable_file import BLOCK_BYTES, write_durably
from instep.train.checkpoint.file_image import FileImage
from instep.train.checkpoint.pieces import Piece


def contents_of(num_bytes: int) -> memoryview:
    """As a save hands it over: aligned to blocks."""
    image = FileImage(torch.device("cpu"))
    numbers = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    image.stage([("a", Piece(numbers, (0,)))])
    return image.contents()


@pytest.mark.parametrize("num_bytes", [0, 1000, 1 << 20, (17 << 20) + 123])
def test_the_file_has_the_bytes_and_the_checksum(tmp_path: Path, num_bytes: int) -> None:
    contents = contents_of(num_bytes)
    entry = write_durably(tmp_path / "file", contents)
    assert (tmp_path / "file").read_bytes() == bytes(contents)
    assert entry.bytes == len(contents)
    assert entry.crc32 == f"{zlib.crc32(contents):08x}"


def test_large_contents_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_file = os.open
    monkeypatch.setattr(
        durable_file.os, "open", lambda path, flags, *mode: opened.append(flags) or open_file(path, flags, *mode)
    )
    write_durably(tmp_path / "large", contents_of(2 << 20))
    write_durably(tmp_path / "small", contents_of(1000))
    write_durably(tmp_path / "bytes", b"x" * (2 << 20))
    assert [bool(flags & durable_file._DIRECT) for flags in opened] == [bool(durable_file._DIRECT), False, False]


def test_a_file_system_without_direct_writes_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & durable_file._DIRECT:
            open(path, "w").close()  # as some do
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *mode)

    monkeypatch.setattr(durable_file.os, "open", refuse)
    contents = contents_of(2 << 20)
    write_durably(tmp_path / "file", contents)
    assert (tmp_path / "file").read_bytes() == bytes(contents)


def test_a_disk_with_coarser_blocks_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = os.write, []

    def refuse(descriptor: int, data: memoryview) -> int:
        if not refused:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data)

    monkeypatch.setattr(durable_file.os, "write", refuse)
    contents = contents_of((2 << 20) - BLOCK_BYTES)
    write_durably(tmp_path / "file", contents)
    assert refused
    assert (tmp_path / "file").read_bytes() == bytes(contents)


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable_file.os, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_durably(tmp_path / "file", contents_of(2 << 20))

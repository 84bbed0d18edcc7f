"""The page in shared memory into which this rank writes what it does."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from instep.records import recording as layout


def open_page(path: Path, rank: int, world_size: int) -> mmap.mmap | bytearray:
    """A page that others can read; private memory when the disk has no room (writing to a hole would be SIGBUS)."""
    page: mmap.mmap | bytearray
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(file, 0, layout.PAGE_BYTES)
            page = mmap.mmap(file, layout.PAGE_BYTES)
        finally:
            os.close(file)
    except (OSError, AttributeError):
        page = bytearray(layout.PAGE_BYTES)
    page[:] = bytes(layout.PAGE_BYTES)
    layout.I64.pack_into(page, layout.LAST_ENQUEUED, -1)
    layout.I64.pack_into(page, layout.LAST_COMPLETED, -1)
    layout.HEADER.pack_into(
        page, 0, layout.MAGIC, layout.VERSION, os.getpid(), rank, world_size, time.monotonic(), time.time()
    )
    return page

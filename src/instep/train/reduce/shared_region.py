"""Memory that all ranks of one host have mapped, with a copy of some tensor and a line of counters for each.

It has no name (memfd), so nothing is left behind however a process ends, and its size is not limited by /dev/shm.
"""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from instep.train.reduce.futex import Futex, has_futex
from instep.train.world import World

LINE_WORDS = 16  # 128 bytes: no two ranks' counters share a cache line or its neighbour
PAGE_BYTES = 4096


@dataclass
class Region:
    """counters: LINE_WORDS numbers of 64 bits per rank, each written by that rank only; copies: one per rank."""

    counters: memoryview
    address: int  # of the counters
    copies: list[Tensor]
    futex: Futex
    generation: int = 0

    def write(self, rank: int, word: int, value: int) -> None:
        self.counters[rank * LINE_WORDS + word] = value
        self.futex.wake(self.address + 8 * (rank * LINE_WORDS + word))

    def sleep(self, rank: int, word: int, value: int, seconds: float) -> None:
        """Until the number is no longer `value`, and at most so long."""
        self.futex.wait(self.address + 8 * (rank * LINE_WORDS + word), value, seconds)

    def read(self, rank: int, word: int) -> int:
        return self.counters[rank * LINE_WORDS + word]

    def all_reached(self, word: int, value: int) -> bool:
        return all(self.read(rank, word) >= value for rank in range(len(self.copies)))


def can_share_memory(world: World) -> bool:
    """Whether it is worth a try: all ranks on one host, on the CPU."""
    return has_futex() and world.device.type == "cpu" and 1 < world.size == world.local_size


def find_peers(group: dist.ProcessGroup) -> list[psutil.Process] | None:
    """All ranks' processes, or None when one rank cannot see the others. Every rank must call it."""
    identities: list[tuple[int, float, str]] = [(0, 0.0, "")] * group.size()
    mine = (os.getpid(), psutil.Process().create_time(), os.readlink("/proc/self/ns/pid"))
    dist.all_gather_object(identities, mine, group=group)
    peers = [find_process(pid, created) for pid, created, namespace in identities if namespace == mine[2]]
    found = [peer for peer in peers if peer is not None]
    return found if all_agree(group, len(found) == group.size()) else None


def find_process(pid: int, created: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < 1 else None
    except psutil.Error:
        return None


def all_agree(group: dist.ProcessGroup, value: bool) -> bool:
    votes: list[bool] = [False] * group.size()
    dist.all_gather_object(votes, value, group=group)
    return all(votes)


def map_region(group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> Region | None:
    """Zeros. Every rank must call it; None on all when one could not open the memory that rank 0 made."""
    rank, size = group.rank(), group.size()
    token_offset = 8 * LINE_WORDS * size
    header_bytes = _round_up(token_offset + 8)
    copy_bytes = _round_up(numel * dtype.itemsize)
    own = make_memory(header_bytes + size * copy_bytes, token_offset) if rank == 0 else None
    try:
        box = [(os.getpid(), *own) if own is not None else None]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        memory = open_memory(*box[0], token_offset) if box[0] is not None else None
        if not all_agree(group, memory is not None) or memory is None:
            return None
    finally:
        if own is not None:
            os.close(own[0])  # the mappings keep it
    starts = range(header_bytes, header_bytes + size * copy_bytes, copy_bytes)
    copies = [memory[start : start + numel * dtype.itemsize].view(dtype) for start in starts]
    copies[rank].zero_()  # touched by its owner first, so that it lies near the owner's core
    return Region(memory[:header_bytes].numpy().data.cast("q"), memory.data_ptr(), copies, Futex())


def make_memory(num_bytes: int, token_offset: int) -> tuple[int, int] | None:
    """A file descriptor and the number written at `token_offset`; None where the system refuses."""
    try:
        descriptor = os.memfd_create("instep-bucket", os.MFD_CLOEXEC)
    except OSError:
        return None
    token = secrets.randbits(62)
    try:
        os.ftruncate(descriptor, num_bytes)
        os.pwrite(descriptor, token.to_bytes(8, sys.byteorder), token_offset)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor, token


def open_memory(pid: int, descriptor: int, token: int, token_offset: int) -> Tensor | None:
    """Rank 0's memory by way of its process; None when that is not allowed or is another file (another host's)."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(opened, 8, token_offset) != token.to_bytes(8, sys.byteorder):
            return None
        size = os.fstat(opened).st_size
        # not mmap.mmap, which keeps a file descriptor for each bucket
        return torch.from_file(f"/proc/self/fd/{opened}", shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
    finally:
        os.close(opened)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

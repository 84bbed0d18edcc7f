"""Sums over the ranks of one host, on the CPU: buckets lie in memory that all ranks have mapped.

When all have filled their copy of a bucket, rank r adds up shard r of all copies and writes the sum into each of them.
The order of the additions is a fixed binary tree over ranks, so the bits do not depend on who adds. Nothing is copied
to or from sockets: the bytes that move are the least that N copies allow.

The memory has no name (memfd), so nothing is left behind however a process ends. Ranks wait by looking at counters in
it; they give way to others early, since ranks often outnumber cores, and notice when a rank they wait for has ended.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from instep.train.reduce.bucket import Bucket, Handle
from instep.train.reduce.group_sum import GroupSum
from instep.train.world import World

# On these a plain store is seen after all stores before it, as the counters need; Python has no memory barrier.
ORDERED_PROCESSORS = ("x86_64", "amd64", "i386", "i686")
CHUNK_BYTES = 256 << 10  # added and written while it lies in the cache of one core
LINE_WORDS = 16  # 128 bytes: no two ranks' counters share a cache line or its neighbour
PAGE_BYTES = 4096
CPU = torch.device("cpu")
LOOKS_BEFORE_SLEEP, LONGEST_SLEEP_SECONDS = 200, 5e-4
PEER_CHECK_SECONDS = 0.2
TIMEOUT = timedelta(minutes=30)  # as torch's groups have it

_ARRIVED, _DONE, _LEFT = 0, 1, 2  # words of a rank's line


def can_share_memory(world: World) -> bool:
    """Whether it is worth a try: all ranks on one host, on the CPU, and a processor that keeps stores in order."""
    return (
        sys.platform == "linux"
        and platform.machine().lower() in ORDERED_PROCESSORS
        and world.device.type == "cpu"
        and 1 < world.size == world.local_size
    )


@dataclass
class Region:
    """The copies of one bucket, and each rank's counters: how often it arrived with it and how often it was done."""

    counters: memoryview
    copies: list[Tensor]
    generation: int = 0


@dataclass
class SharedHandle:
    owner: SharedSum
    region: Region
    generation: int
    index: int
    summed: bool = field(default=False)

    def is_completed(self) -> bool:
        return self.summed and self.owner.all_reached(self.region, _DONE, self.generation)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError when a rank does not come in time (it may be called again), has left, or has ended."""
        deadline = time.monotonic() + (timeout or TIMEOUT).total_seconds()
        self.owner.work_until(self, deadline)
        self.owner.await_ranks(self, _DONE, deadline)


class SharedSum:
    """A transport. `allocate` gives the memory that a bucket has to lie in; any other bucket goes through the group.

    A rank does its part of the work in `wait`: where ranks share the cores of one host, a thread would gain nothing.
    """

    def __init__(self, group: dist.ProcessGroup, world: World) -> None:
        self.group, self.rank, self.size = group, world.rank, world.size
        self._plain = GroupSum(group)
        self._regions: dict[int, tuple[weakref.ref[Tensor], Region]] = {}  # by address of this rank's copy
        self._waiting: list[SharedHandle] = []  # started, and not yet added up by this rank
        self._peers = self._meet() if can_share_memory(world) else None
        self._yields_at = 20 if self._peers and len(os.sched_getaffinity(0)) >= self.size else 0

    @property
    def is_shared(self) -> bool:
        """False when the ranks cannot see each other's memory; then all goes through the group."""
        return self._peers is not None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """Zeros for a bucket of every rank. Every rank must call it, in the same order and with the same sizes."""
        shared = self.is_shared and numel > 0 and device.type == "cpu"
        region = self._map(numel, dtype) if shared else None
        if region is None:
            return torch.zeros(numel, dtype=dtype, device=device)
        self._regions = {key: entry for key, entry in self._regions.items() if entry[0]() is not None}
        flat = region.copies[self.rank][:]
        self._regions[flat.data_ptr()] = (weakref.ref(flat), region)
        return flat

    def start(self, bucket: Bucket) -> Handle:
        _, region = self._regions.get(bucket.flat.data_ptr(), (None, None))
        if region is None or region.copies[0].numel() != bucket.flat.numel():
            return self._plain.start(bucket)
        region.generation += 1
        handle = SharedHandle(self, region, region.generation, bucket.index)
        self._waiting.append(handle)
        region.counters[self.rank * LINE_WORDS + _ARRIVED] = region.generation
        return handle

    def close(self) -> None:
        """Tells ranks that still wait that this one does not come any more."""
        for _, region in self._regions.values():
            region.counters[self.rank * LINE_WORDS + _LEFT] = 1
        self._regions.clear()
        self._waiting.clear()

    def work_until(self, last: SharedHandle, deadline: float) -> None:
        """Does this rank's part of all buckets that were started up to `last` and after it, in order.

        The later ones too: a rank that is ahead would otherwise make the others wait for it once per bucket.
        """
        while self._waiting:
            handle = self._waiting[0]
            if last.summed and not self.all_reached(handle.region, _ARRIVED, handle.generation):
                return
            self.await_ranks(handle, _ARRIVED, deadline)
            add_up_shard(handle.region.copies, self.rank)
            handle.region.counters[self.rank * LINE_WORDS + _DONE] = handle.generation
            handle.summed = True
            self._waiting.pop(0)

    def all_reached(self, region: Region, word: int, generation: int) -> bool:
        return all(region.counters[rank * LINE_WORDS + word] >= generation for rank in range(self.size))

    def await_ranks(self, handle: SharedHandle, word: int, deadline: float) -> None:
        """Looks at the counters: at first all the time, then giving way to whoever wants the core, then asleep."""
        counters, looks, sleep_seconds = handle.region.counters, 0, 2e-5
        next_check = 0.0
        for rank in range(self.size):
            position = rank * LINE_WORDS + word
            while counters[position] < handle.generation:
                looks += 1
                if looks < LOOKS_BEFORE_SLEEP:
                    if looks > self._yields_at:
                        os.sched_yield()
                    continue
                time.sleep(sleep_seconds)
                sleep_seconds = min(1.5 * sleep_seconds, LONGEST_SLEEP_SECONDS)
                now = time.monotonic()
                if now >= next_check:
                    next_check = now + PEER_CHECK_SECONDS
                    self._check_alive(handle, rank, word)
                if now >= deadline:
                    raise RuntimeError(f"bucket {handle.index} timed out waiting for rank {rank}")

    def _check_alive(self, handle: SharedHandle, rank: int, word: int) -> None:
        """Raises RuntimeError when `rank` has ended or left, unless it did its part just before."""
        assert self._peers is not None
        peer, counters = self._peers[rank], handle.region.counters
        ended = not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE
        left = counters[rank * LINE_WORDS + _LEFT] > 0
        if (ended or left) and counters[rank * LINE_WORDS + word] < handle.generation:
            what = f"its process {peer.pid} has ended" if ended else "it has left the run"
            raise RuntimeError(f"rank {rank} does not come to bucket {handle.index}: {what}")

    def _meet(self) -> list[psutil.Process] | None:
        """All ranks' processes, or None when one of them cannot see the others."""
        identities: list[tuple[int, float, str]] = [(0, 0.0, "")] * self.size
        mine = (os.getpid(), psutil.Process().create_time(), os.readlink("/proc/self/ns/pid"))
        dist.all_gather_object(identities, mine, group=self.group)
        peers = [_find_process(pid, created) for pid, created, namespace in identities if namespace == mine[2]]
        found = [peer for peer in peers if peer is not None]
        return found if self._all_agree(len(found) == self.size) else None

    def _all_agree(self, value: bool) -> bool:
        votes: list[bool] = [False] * self.size
        dist.all_gather_object(votes, value, group=self.group)
        return all(votes)

    def _map(self, numel: int, dtype: torch.dtype) -> Region | None:
        """None when a rank could not open the memory that rank 0 made; the same on all ranks."""
        header_bytes = _round_up(8 * LINE_WORDS * (self.size + 1))
        copy_bytes = _round_up(numel * dtype.itemsize)
        box: list[tuple[int, int, int] | None] = [None]
        own = -1
        if self.rank == 0:
            own = os.memfd_create("instep-bucket", os.MFD_CLOEXEC)
            os.ftruncate(own, header_bytes + self.size * copy_bytes)
            box[0] = (os.getpid(), own, secrets.randbits(62))
            os.pwrite(own, box[0][2].to_bytes(8, sys.byteorder), 8 * LINE_WORDS * self.size)
        try:
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
            assert box[0] is not None
            memory = _open_memory(*box[0], 8 * LINE_WORDS * self.size)
            if not self._all_agree(memory is not None) or memory is None:
                return None
        finally:
            if own >= 0:
                os.close(own)  # the mappings keep it
        counters = memory[:header_bytes].numpy().data.cast("q")
        starts = range(header_bytes, header_bytes + self.size * copy_bytes, copy_bytes)
        copies = [memory[start : start + numel * dtype.itemsize].view(dtype) for start in starts]
        copies[self.rank].zero_()  # touched by its owner first, so that it lies near the owner's core
        return Region(counters, copies)


def _find_process(pid: int, created: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < 1 else None
    except psutil.Error:
        return None


def _open_memory(pid: int, descriptor: int, token: int, token_offset: int) -> Tensor | None:
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


def add_up_shard(copies: list[Tensor], shard: int) -> None:
    """Writes the sum of all copies into each, for one of as many shards as there are copies."""
    numel, size = copies[0].numel(), len(copies)
    line = 64 // copies[0].element_size()  # shards begin at cache lines, so that no two ranks write to one
    width = -(-numel // (size * line)) * line
    step = CHUNK_BYTES // copies[0].element_size()
    end = min(numel, (shard + 1) * width)
    for begin in range(shard * width, end, step):
        pieces = [copy[begin : min(begin + step, end)] for copy in copies]
        total = add_in_tree(pieces)
        for piece in pieces:
            piece.copy_(total)


def add_in_tree(parts: list[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + 4, and so on; 16-bit numbers are added as fp32."""
    if parts[0].dtype in (torch.bfloat16, torch.float16):
        parts = [part.float() for part in parts]
    while len(parts) > 1:
        pairs = [torch.add(one, other) for one, other in zip(parts[::2], parts[1::2])]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]

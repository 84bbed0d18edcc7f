"""Sums over the ranks of one host, on the CPU: buckets lie in memory that all ranks have mapped.

When all have filled their copy of a bucket, rank r adds up shard r of all copies and writes the sum into each of them.
The order of the additions is a fixed binary tree over ranks, so the bits do not depend on who adds. Nothing is copied
to or from sockets: the bytes that move are the least that N copies allow.

Ranks wait for counters in that memory. They soon sleep until one changes, since ranks often outnumber cores, and notice
when a rank they wait for has ended. What watches from outside cannot see such a wait; so one that takes long
is announced by a collective of torch.distributed, which the others take part in when they come.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from instep.train.reduce.bucket import Bucket, Handle, forget_nothing
from instep.train.reduce.group_sum import GroupSum
from instep.train.reduce.shared_region import Region, can_share_memory, find_peers, map_region
from instep.train.world import World

CHUNK_BYTES = 256 << 10  # added and written while it lies in the cache of one core
LOOKS_BEFORE_SLEEP = 200  # some 20 us, about what it takes to be woken; only where each rank has a core
PEER_CHECK_SECONDS = 0.2
ANNOUNCE_AFTER_SECONDS = 2.0  # healthy ranks rarely wait so long, and a stall is called one after many more
TIMEOUT = timedelta(minutes=30)  # as torch's groups have it
CPU = torch.device("cpu")

_ARRIVED, _DONE = 0, 1  # words of a bucket's region: how often a rank came with it, and had done its part
_LEFT, _ANNOUNCED = 0, 1  # words of the board


@dataclass
class SharedHandle:
    owner: SharedSum
    region: Region
    generation: int
    index: int
    summed: bool = False
    announced: bool = False  # only once, however often the wait is taken up again: from outside it looks like progress

    def is_completed(self) -> bool:
        return self.summed and self.region.all_reached(_DONE, self.generation)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError when a rank does not come in time (it may be called again), has left, or has ended."""
        deadline = time.monotonic() + (timeout or TIMEOUT).total_seconds()
        self.owner.work_until(self, deadline)
        self.owner.await_ranks(self, _DONE, deadline)
        self.owner.join_announcements()


class SharedSum:
    """A transport. `allocate` gives the memory that a bucket has to lie in; any other bucket goes through the group.

    A rank does its part of the work in `wait`: where ranks share the cores of one host, a thread would gain nothing.
    """

    rescale = staticmethod(forget_nothing)

    def __init__(self, group: dist.ProcessGroup, world: World) -> None:
        self.group, self.rank, self.size = group, world.rank, world.size
        self._plain = GroupSum(group)
        self._regions: dict[int, tuple[weakref.ref[Tensor], Region]] = {}  # by address of this rank's copy
        self._waiting: list[SharedHandle] = []  # started, and not yet added up by this rank
        self._peers: list[psutil.Process] = (find_peers(group) if can_share_memory(world) else None) or []
        self._board = map_region(group, 1, torch.int64) if self._peers else None
        if self.is_shared:
            self._looks = LOOKS_BEFORE_SLEEP if len(os.sched_getaffinity(0)) >= self.size else 1
            self._announcing = world.new_group()  # nothing else is sent in it, so ranks may join at any time
            self._announcements: list[tuple[Any, Tensor]] = []
            self._num_announced = 0

    @property
    def is_shared(self) -> bool:
        """False when the ranks cannot see each other's memory; then all goes through the group."""
        return self._board is not None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """Zeros for a bucket of every rank. Every rank must call it, in the same order and with the same sizes."""
        shared = self.is_shared and numel > 0 and device.type == "cpu"
        region = map_region(self.group, numel, dtype) if shared else None
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
        region.write(self.rank, _ARRIVED, region.generation)
        return handle

    def close(self) -> None:
        """Tells ranks that still wait that this one does not come any more."""
        if self._board is not None:
            self._board.write(self.rank, _LEFT, 1)
        self._regions.clear()
        self._waiting.clear()

    def work_until(self, last: SharedHandle, deadline: float) -> None:
        """Does this rank's part of all buckets that were started up to `last`, and of later ones that all came to.

        The later ones too: a rank that is ahead would otherwise make the others wait for it once per bucket.
        """
        while self._waiting:
            handle = self._waiting[0]
            if last.summed and not handle.region.all_reached(_ARRIVED, handle.generation):
                return
            self.await_ranks(handle, _ARRIVED, deadline)
            add_up_shard(handle.region.copies, self.rank)
            handle.region.write(self.rank, _DONE, handle.generation)
            handle.summed = True
            self._waiting.pop(0)

    def await_ranks(self, handle: SharedHandle, word: int, deadline: float) -> None:
        for rank in range(self.size):
            if handle.region.read(rank, word) < handle.generation:
                self._await_rank(handle, rank, word, deadline)

    def _await_rank(self, handle: SharedHandle, rank: int, word: int, deadline: float) -> None:
        """Looks at the counter for a moment, then sleeps until it changes."""
        region, generation = handle.region, handle.generation
        for _ in range(self._looks):
            if region.read(rank, word) >= generation:
                return
        started = time.monotonic()
        while (value := region.read(rank, word)) < generation:
            region.sleep(rank, word, value, min(PEER_CHECK_SECONDS, max(0.0, deadline - time.monotonic())))
            now = time.monotonic()
            if now >= started + PEER_CHECK_SECONDS:
                self._check_alive(handle, rank, word)
            if now >= started + ANNOUNCE_AFTER_SECONDS and not handle.announced:
                handle.announced = True
                self._announce(self._num_announced + 1)
            if now >= deadline and region.read(rank, word) < generation:
                raise RuntimeError(f"bucket {handle.index} timed out waiting for rank {rank}")

    def _check_alive(self, handle: SharedHandle, rank: int, word: int) -> None:
        """Raises RuntimeError when `rank` has ended or left, unless it did its part just before."""
        assert self._board is not None
        peer = self._peers[rank]
        ended = not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE
        left = self._board.read(rank, _LEFT) > 0
        if (ended or left) and handle.region.read(rank, word) < handle.generation:
            what = f"its process {peer.pid} has ended" if ended else "it has left the run"
            raise RuntimeError(f"rank {rank} does not come to bucket {handle.index}: {what}")

    def join_announcements(self) -> None:
        """Takes part in those that other ranks have begun."""
        assert self._board is not None
        for rank in range(self.size):
            if self._board.read(rank, _ANNOUNCED) > self._num_announced:
                self._announce(self._board.read(rank, _ANNOUNCED))

    def _announce(self, number: int) -> None:
        """Begins collectives up to the `number`-th and waits for none: all ranks begin the same ones sooner or later."""
        assert self._board is not None
        self._announcements = [entry for entry in self._announcements if not entry[0].is_completed()]
        while self._num_announced < number:
            token = torch.zeros(1)
            self._announcements.append((dist.all_reduce(token, group=self._announcing, async_op=True), token))
            self._num_announced += 1
        self._board.write(self.rank, _ANNOUNCED, self._num_announced)


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
            if piece is not total:
                piece.copy_(total)


def add_in_tree(parts: list[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + 4, and so on, in place; 16-bit numbers are added as fp32, outside."""
    if parts[0].dtype in (torch.bfloat16, torch.float16):
        parts = [part.float() for part in parts]
    while len(parts) > 1:
        for one, other in zip(parts[::2], parts[1::2]):
            one.add_(other)
        parts = parts[::2]
    return parts[0]

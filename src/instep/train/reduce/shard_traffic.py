"""How the parts of sharded parameters travel on the CPU, where PyTorch's own ways are slow: gloo runs a reduce-scatter as
an all-reduce of the whole.

FSDP2 takes any object that allocates and that moves (`set_custom_reduce_scatter`, `set_custom_all_gather`). On one host
the bytes go through memory that all ranks have mapped; between hosts an all-to-all brings each rank its pieces, half the
bytes of an all-reduce, and the rank adds them up itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.records.choice import Choice
from instep.records.parallel import Parallel
from instep.settings import read_setting
from instep.train.mesh import along_shard
from instep.train.reduce.shared_memory import CHUNK_BYTES, TIMEOUT, SharedHandle, SharedSum, add_in_tree
from instep.train.reduce.shared_region import Region, can_share_memory, map_region
from instep.train.techniques.shard import sharded_modules
from instep.train.world import World

_ARRIVED, _DONE = 0, 1  # words of a region: how often a rank has filled its copy, and has read those of the others
MOST_REGIONS = 16  # of different sizes; a model has few kinds of blocks


def choose_traffic(model: nn.Module, split: Parallel, everyone: World, say: Callable[[str], None]) -> Leaving:
    """model: sharded; everyone: all ranks. Returns what to remove at the end. Every rank must call it."""
    world = along_shard(split, everyone)
    group = world.new_group()
    if group is None or world.device.type != "cpu":
        return Leaving(None)  # NCCL has all of it
    modules = sharded_modules(model)
    wanted = all(world.gather_objects(read_setting("shared_memory").value, "run.prepare"))
    waits = SharedSum(group, world) if wanted and can_share_memory(world) else None
    if waits is None or not waits.is_shared:
        by_pieces = PiecewiseScatter(group)
        for module in modules:
            module.set_custom_reduce_scatter(by_pieces)
        return Leaving(None)
    reason = "all ranks are on this host and on the CPU, so nothing has to be sent"
    say(str(Choice("shared_memory", True, reason, "INSTEP_SHARED_MEMORY=off")))
    scatter, gather = SharedScatter(waits), SharedGather(waits)
    for module in modules:
        module.set_custom_reduce_scatter(scatter)
        module.set_custom_all_gather(gather)
    return Leaving(waits)


@dataclass
class Leaving:
    """Tells ranks that still wait that this one does not come any more."""

    waits: SharedSum | None

    def remove(self) -> None:
        if self.waits is not None:
            self.waits.close()


class PiecewiseScatter:
    """A reduce-scatter by all-to-all and local sums.

    The memory to send from and to receive in is kept: fresh pages cost more than the bytes take to travel. FSDP2 asks for
    the input's memory, then for the output's, then calls, and returns from the call when the bytes have come.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group  # apart from the one that gathers, so that the two never pair
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._has_input:
            return torch.empty(*size, dtype=dtype, device=device)
        self._has_input = True
        return self._keep("input", math.prod(size), dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op
        self._has_input = False
        pieces = self._keep("pieces", input_tensor.numel(), input_tensor.dtype)
        dist.all_to_all_single(pieces, input_tensor, group=self._group)
        add_up(list(pieces.view(self._group.size(), -1)), output_tensor)

    def _keep(self, use: str, numel: int, dtype: torch.dtype) -> Tensor:
        kept = self._kept.get((use, dtype))
        if kept is None or kept.numel() < numel:
            kept = self._kept[use, dtype] = torch.empty(numel, dtype=dtype)
        return kept[:numel]


class SharedRegions:
    """Regions by size, mapped at first use, and the waits for other ranks."""

    def __init__(self, waits: SharedSum) -> None:
        self.waits = waits
        self._regions: dict[tuple[int, torch.dtype], Region | None] = {}

    def find(self, numel: int, dtype: torch.dtype) -> Region | None:
        """A region whose copies nobody reads any more. None: let the bytes go another way. Every rank must call it."""
        key = numel, dtype
        if key not in self._regions:
            mapped = len(self._regions) < MOST_REGIONS and numel > 0
            self._regions[key] = map_region(self.waits.group, numel, dtype) if mapped else None
        region = self._regions[key]
        if region is not None and region.generation:
            self._await(region, _DONE)
        return region

    def arrive(self, region: Region) -> None:
        """This rank has filled its copy; waits until all have."""
        region.generation += 1
        region.write(self.waits.rank, _ARRIVED, region.generation)
        self._await(region, _ARRIVED)

    def leave(self, region: Region) -> None:
        """This rank has read what it needs."""
        region.write(self.waits.rank, _DONE, region.generation)

    def _await(self, region: Region, word: int) -> None:
        if region.all_reached(word, region.generation):
            return
        handle = SharedHandle(self.waits, region, region.generation, index=0)
        self.waits.await_ranks(handle, word, time.monotonic() + TIMEOUT.total_seconds())
        self.waits.join_announcements()


class SharedScatter:
    """A reduce-scatter in which each rank adds up its part of all ranks' gradients where they lie.

    FSDP2 asks for the input's memory, then for the output's, then calls. The input is a rank's copy in a region; the
    output is its own, since gradients live there.
    """

    def __init__(self, waits: SharedSum) -> None:
        self._regions = SharedRegions(waits)
        self._input: tuple[Region | None, int] | None = None  # between the allocation of the input and the call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._input is None:
            region = self._regions.find(math.prod(size), dtype)
            flat = None if region is None else region.copies[self._regions.waits.rank]
            self._input = region, 0 if flat is None else flat.data_ptr()
            if flat is not None:
                return flat
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        (region, address), self._input = self._input or (None, 0), None
        assert op == dist.ReduceOp.SUM and not async_op
        if region is None:
            PiecewiseScatter(self._regions.waits.group)(output_tensor, input_tensor, group, op)
            return
        assert address == input_tensor.data_ptr(), "FSDP2 allocates in another order than it did"
        self._regions.arrive(region)
        begin = self._regions.waits.rank * output_tensor.numel()
        add_up([copy[begin : begin + output_tensor.numel()] for copy in region.copies], output_tensor)
        self._regions.leave(region)


class SharedGather:
    """An all-gather by way of a region: each rank shows its part and copies those of the others.

    What comes out is a rank's own memory, so that it does not matter how long FSDP2 keeps it.
    """

    def __init__(self, waits: SharedSum) -> None:
        self._regions = SharedRegions(waits)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        assert not async_op
        region = self._regions.find(input_tensor.numel(), input_tensor.dtype)
        if region is None:
            parts = list(output_tensor.chunk(group.size()))
            dist.all_gather(parts, input_tensor, group=self._regions.waits.group)
            return
        rank = self._regions.waits.rank
        region.copies[rank].copy_(input_tensor)
        self._regions.arrive(region)
        for other, part in enumerate(output_tensor.chunk(group.size())):
            if other != rank:
                part.copy_(region.copies[other])
        self._regions.leave(region)


def add_up(pieces: list[Tensor], total: Tensor) -> None:
    """Their sum, in the order of a fixed binary tree. The pieces are spent: partial sums are kept in them."""
    step = CHUNK_BYTES // total.element_size()
    for begin in range(0, total.numel(), step):
        parts = [piece[begin : begin + step] for piece in pieces]
        into = total[begin : begin + step]
        if len(parts) == 2 and total.element_size() >= 4:
            torch.add(parts[0], parts[1], out=into)
        else:
            into.copy_(add_in_tree(parts))

"""Brings values that each rank holds alone to all the others, as after an update of which every rank made a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from instep.train.reduce.bucket import Transport
from instep.train.reduce.shard_traffic import SharedRegions
from instep.train.reduce.shared_memory import SharedSum
from instep.train.reduce.shared_region import Region
from instep.train.world import World

CHUNK_BYTES = 2 << 20  # shown at once: a wait for it is short beside its copies, and it stays in cache
SMALL_BYTES = 64 << 10  # below, a message of one's own costs more than a copy


class Spread(Protocol):
    def __call__(self, owned: Sequence[Sequence[Tensor]], what: str) -> None:
        """Fills tensors on the ranks that do not own them. owned: by rank; tensors of the same kinds in the same order on all
        ranks, and every rank must call it. what: names the call."""
        ...


def choose_spread(transport: Transport, data: World) -> Spread:
    """Through shared memory where gradients go that way. Every rank must call it."""
    by_group = GroupSpread(data)
    is_shared = isinstance(transport, SharedSum) and transport.is_shared
    return SharedSpread(transport, by_group) if is_shared else by_group  # type: ignore[arg-type]


class GroupSpread:
    """By broadcasts: large tensors as they lie, small ones of an owner together."""

    def __init__(self, data: World) -> None:
        self._data, self._group = data, data.new_group()

    def __call__(self, owned: Sequence[Sequence[Tensor]], what: str) -> None:
        if self._group is None:
            return
        sent: list[tuple[Any, Tensor, list[Tensor]]] = []
        in_turn = zip_longest(*([(owner, t) for t in tensors] for owner, tensors in enumerate(owned)))
        small: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        for owner, tensor in filter(None, chain.from_iterable(in_turn)):
            if tensor.is_contiguous() and tensor.numel() * tensor.element_size() >= SMALL_BYTES:
                sent.append((self._start(owner, tensor), tensor, []))
            else:
                small.setdefault((owner, tensor.dtype, tensor.device), []).append(tensor)
        for (owner, _, _), tensors in small.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            sent.append((self._start(owner, flat), flat, tensors if owner != self._data.rank else []))
        for handle, flat, tensors in sent:
            self._data.wait(handle, what)
            if tensors:
                for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
                    tensor.copy_(values.view_as(tensor))

    def _start(self, owner: int, tensor: Tensor) -> Any:
        return dist.broadcast(tensor, group_src=owner, group=self._group, async_op=True)


class SharedSpread:
    """By way of a region: each rank shows what it owns, a chunk after the other, and copies what the others show.

    otherwise: takes over where the system gives no such memory.
    """

    def __init__(self, waits: SharedSum, otherwise: Spread) -> None:
        self._regions, self._otherwise = SharedRegions(waits), otherwise

    def __call__(self, owned: Sequence[Sequence[Tensor]], what: str) -> None:
        flats = [[_flat_bytes(tensor) for tensor in tensors] for tensors in owned]
        longest = max(sum(flat.numel() for flat in some) for some in flats)
        for begin in range(0, longest, CHUNK_BYTES):
            region = self._regions.find(CHUNK_BYTES, torch.uint8)
            if region is None:
                self._otherwise(owned, what)
                return
            self._exchange(region, [list(_within(some, begin, begin + CHUNK_BYTES)) for some in flats])
        for tensor, flat in zip(chain(*owned), chain(*flats)):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def _exchange(self, region: Region, pieces: list[list[tuple[int, Tensor]]]) -> None:
        """pieces: by owner, where they lie in its chunk."""
        rank = self._regions.waits.rank
        for offset, piece in pieces[rank]:
            region.copies[rank][offset : offset + piece.numel()].copy_(piece)
        self._regions.arrive(region)
        for owner, some in enumerate(pieces):
            for offset, piece in some if owner != rank else ():
                piece.copy_(region.copies[owner][offset : offset + piece.numel()])
        self._regions.leave(region)


def _flat_bytes(tensor: Tensor) -> Tensor:
    """In the same memory where the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _within(flats: Sequence[Tensor], begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
    """What of the flats, one after another, lies from `begin` to `end`, each piece with its distance from `begin`."""
    start = 0
    for flat in flats:
        low, high = max(begin, start), min(end, start + flat.numel())
        if low < high:
            yield low - begin, flat[low - start : high - start]
        start += flat.numel()

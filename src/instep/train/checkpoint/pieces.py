"""Pieces of tensors: which part of each this rank holds, and which rank writes it.

A plain tensor is one piece that every rank holds. A DTensor is cut by its placements; where it is replicated, several
ranks hold the same piece. Every piece is written once, by one of its holders, so that all write about as much.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

LEAST_CUT_BYTES = 256 << 10  # below this a further piece costs more than it balances


@dataclass(frozen=True)
class Piece:
    """local: the numbers, on this rank; offsets: where they begin in the whole tensor."""

    local: torch.Tensor
    offsets: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.local.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes))


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Without importing DTensor, which takes a second: where nobody has, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_pieces(tensor: torch.Tensor) -> list[Piece]:
    """This rank's part of a tensor; none when an uneven split left nothing here."""
    if not is_dtensor(tensor):
        return [Piece(tensor.detach(), (0,) * tensor.dim())]
    local = tensor.to_local().detach()  # type: ignore[operator]
    if tensor.numel() and not local.numel():
        return []
    return [Piece(local, _offsets(tensor))]


def _offsets(tensor: Any) -> tuple[int, ...]:
    """Where this rank's part of a DTensor begins. Private in torch, so only here (a test notices a change): the
    protocol by which torch.distributed.checkpoint asks tensors, else the function below it."""
    if hasattr(tensor, "__create_chunk_list__"):
        (chunk,) = tensor.__create_chunk_list__()
        return tuple(chunk.offsets)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


@dataclass(frozen=True)
class Part:
    """A piece without its numbers, as ranks tell each other. cuttable: may be split further by rows."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int
    cuttable: bool = False

    @property
    def key(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return self.name, self.offsets, self.sizes

    def cut(self, count: int) -> list[Part]:
        if not self.cuttable or count < 2 or not self.sizes or self.sizes[0] < count:
            return [self]
        rows = self.sizes[0]
        edges = [rows * index // count for index in range(count + 1)]
        return [
            Part(
                self.name,
                (self.offsets[0] + begin, *self.offsets[1:]),
                (end - begin, *self.sizes[1:]),
                self.num_bytes // rows * (end - begin),
            )
            for begin, end in pairwise(edges)
        ]


def describe_parts(tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    """What this rank holds."""
    return [
        Part(
            name,
            piece.offsets,
            piece.sizes,
            piece.local.numel() * piece.local.element_size(),
            not is_dtensor(tensor),
        )
        for name, tensor in tensors.items()
        for piece in local_pieces(tensor)
    ]


def assign_writers(held: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """For each rank, the parts that it writes. held: what each rank holds. The same answer on every rank.

    Parts above a quarter of a fair share are cut. Largest first, each goes to the holder with the least to write who
    has no other part of that tensor, since a file of tensors cannot hold two of one name.
    """
    holders: dict[Part, list[int]] = defaultdict(list)
    for rank, parts in enumerate(held):
        for part in parts:
            holders[part].append(rank)
    total = sum(part.num_bytes for part in holders)
    most = max(total // (4 * len(held)), LEAST_CUT_BYTES)
    found = [
        (piece, ranks)
        for part, ranks in holders.items()
        for piece in part.cut(min(-(-part.num_bytes // most), len(ranks)))
    ]
    load = [0] * len(held)
    names: list[set[str]] = [set() for _ in held]
    writes: list[list[Part]] = [[] for _ in held]
    for part, ranks in sorted(found, key=lambda item: (-item[0].num_bytes, item[0].key)):
        rank = min((rank for rank in ranks if part.name not in names[rank]), key=lambda rank: (load[rank], rank))
        writes[rank].append(part)
        names[rank].add(part.name)
        load[rank] += part.num_bytes
    return writes


def select(tensors: Mapping[str, torch.Tensor], parts: Sequence[Part]) -> list[tuple[str, Piece]]:
    """The numbers of parts that this rank holds."""
    found = []
    for part in parts:
        (whole,) = local_pieces(tensors[part.name])
        begin = tuple(offset - base for offset, base in zip(part.offsets, whole.offsets))
        window = tuple(slice(start, start + size) for start, size in zip(begin, part.sizes))
        found.append((part.name, Piece(whole.local[window], part.offsets)))
    return found

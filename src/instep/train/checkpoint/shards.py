"""Tensors that lie in pieces in several safetensors files, read as wholes or as the part that a rank wants."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from instep.errors import CheckpointError
from instep.train.checkpoint.file_image import DTYPES
from instep.train.checkpoint.pieces import Piece, local_pieces
from instep.train.checkpoint.source import Described


@dataclass(frozen=True)
class Shard:
    """A piece in a file."""

    file: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ShardIndex:
    described: dict[str, Described]
    shards: dict[str, list[Shard]]

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fills targets, file by file. Raises CheckpointError for what is not here, or is of another shape."""
        work: dict[Path, list[tuple[str, torch.Tensor, tuple[slice, ...]]]] = defaultdict(list)
        for name, target in targets.items():
            self._check(name, target)
            for piece in local_pieces(target):
                covered = 0
                for shard in self.shards[name]:
                    overlap = find_overlap(shard, piece)
                    if overlap is not None:
                        there, here = overlap_slices(overlap, shard, piece)
                        work[shard.file].append((name, piece.local[here], there))
                        covered += count(overlap)
                if covered != piece.local.numel():
                    raise CheckpointError(f"{name} is not whole: {covered} of {piece.local.numel()} numbers are there.")
        for file, items in work.items():
            with safe_open(file, framework="pt") as opened, torch.no_grad():
                for name, room, there in items:
                    room.copy_(opened.get_slice(name)[there])

    def _check(self, name: str, target: torch.Tensor) -> None:
        if name not in self.described:
            raise CheckpointError(f"there is no tensor {name!r} in the checkpoint.")
        if self.described[name].shape != tuple(target.shape):
            raise CheckpointError(
                f"{name} has shape {self.described[name].shape} in the checkpoint and {tuple(target.shape)} here."
            )


def index_files(files: Iterable[Path]) -> ShardIndex:
    """Reads the heads of safetensors files, plain or with offsets as torch.distributed.checkpoint writes them."""
    described: dict[str, Described] = {}
    shards: dict[str, list[Shard]] = defaultdict(list)
    for file in files:
        for name, dtype, shard in _read_head(file):
            shards[name].append(shard)
            ends = tuple(offset + size for offset, size in zip(shard.offsets, shard.sizes))
            if name in described:
                ends = tuple(map(max, ends, described[name].shape))
            described[name] = Described(ends, dtype)
    return ShardIndex(described, dict(shards))


def _read_head(file: Path) -> Iterable[tuple[str, torch.dtype, Shard]]:
    try:
        with safe_open(file, framework="pt") as opened:
            offsets = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118  it is no dict
                view = opened.get_slice(name)
                sizes = tuple(view.get_shape())
                begin = tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(sizes)
                yield name, DTYPES[view.get_dtype()], Shard(file, begin, sizes)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {error}.") from None


def find_overlap(shard: Shard, piece: Piece) -> list[tuple[int, int]] | None:
    """Begin and end of what they share in each dimension of the whole tensor; None when they share nothing."""
    spans = [
        (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(shard.offsets, shard.sizes, piece.offsets, piece.sizes)
    ]
    return spans if all(begin < end for begin, end in spans) else None


def overlap_slices(
    spans: list[tuple[int, int]], shard: Shard, piece: Piece
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The same numbers as seen in the shard, and as seen in the piece."""
    there = tuple(slice(begin - base, end - base) for (begin, end), base in zip(spans, shard.offsets))
    here = tuple(slice(begin - base, end - base) for (begin, end), base in zip(spans, piece.offsets))
    return there, here


def count(spans: list[tuple[int, int]]) -> int:
    return math.prod(end - begin for begin, end in spans)

"""The ranks as a grid, one axis per way to share the model, and the groups that follow from it.

From outside to inside the axes are pipeline, replicate, shard and tensor, so that ranks that talk most are neighbours.
Replicate and shard together are the data axis: a place on it is a data rank, and has micro-batches of its own. Ranks
that share a data rank (its peers, along pipeline and tensor) get the same micro-batches and random numbers, and count
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from instep.records.parallel import Parallel
from instep.train.world import World

AXES = ("pipeline", "replicate", "shard", "tensor")  # outside to inside


def degrees(split: Parallel) -> dict[str, int]:
    """By axis, outside to inside. split: fitted to the number of ranks."""
    return {axis: int(getattr(split, axis) or 1) for axis in AXES}


def places(split: Parallel) -> list[tuple[int, ...]]:
    """By rank, where it stands on each axis of AXES."""
    return list(product(*(range(degree) for degree in degrees(split).values())))


def num_peers(split: Parallel) -> int:
    """How many ranks share a data rank."""
    of = degrees(split)
    return of["pipeline"] * of["tensor"]


def data_place(split: Parallel, rank: int) -> tuple[int, int]:
    """The data rank of a rank, and how many there are."""
    of = degrees(split)
    _, replicate, shard, _ = places(split)[rank]
    return replicate * of["shard"] + shard, of["replicate"] * of["shard"]


@dataclass(frozen=True)
class Grid:
    """world: all ranks; data: those that hold the same part of the model as this one, by data rank; peers: those that
    share this one's data rank, by pipeline stage and then by place on the tensor axis."""

    split: Parallel
    world: World
    data: World
    peers: World

    @property
    def pipeline_rank(self) -> int:
        return places(self.split)[self.world.rank][0]

    @property
    def tensor_rank(self) -> int:
        return places(self.split)[self.world.rank][3]

    def one_per_data_rank(self) -> list[int]:
        """The first rank of each data rank, in the order of data ranks."""
        return [rank for rank, place in enumerate(places(self.split)) if place[0] == place[3] == 0]

    def agree(self, flag: bool, what: str) -> bool:
        """Whether it is set on a peer. Every rank must call it."""
        return flag if self.peers.size == 1 else any(self.sum_over_peers([float(flag)], what))

    def sum_over_peers(self, numbers: Sequence[float], what: str) -> list[float]:
        """Sums of a few numbers; the same bits on all peers. Every rank must call it."""
        return _sum(self.peers, numbers, what)

    def sum_over_data(self, number: float, what: str) -> float:
        """Over the ranks that hold the same part of the model. Every rank must call it."""
        return _sum(self.data, [number], what)[0]

    def has_layout_of(self, split: Parallel) -> bool:
        """Whether another split gives every rank the same data and peers."""
        return (split.pipeline, split.tensor) == (self.split.pipeline, self.split.tensor)


def _sum(part: World, numbers: Sequence[float], what: str) -> list[float]:
    if part.size == 1:
        return list(numbers)
    row = torch.tensor(numbers, dtype=torch.float64)
    part.wait(dist.all_reduce(row, group=part.host_group, async_op=True), what)
    return row.tolist()


def lay_out(split: Parallel, world: World) -> Grid:
    """Makes the groups along the axes. split: fitted to the number of ranks. Every rank must call it."""
    ranks = dict(enumerate(places(split)))
    data = _division([(place[0], place[3]) for place in ranks.values()])
    peers = _division([(place[1], place[2]) for place in ranks.values()])
    return Grid(split, world, world.part(data), world.part(peers))


def along_shard(split: Parallel, world: World) -> World:
    """Of all ranks those that share the parameters of this one. Every rank must call it."""
    return world.part(_division([(pipeline, replicate, tensor) for pipeline, replicate, _, tensor in places(split)]))


def _division(keys: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Ranks with the same key together."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank, key in enumerate(keys):
        parts.setdefault(key, []).append(rank)
    return list(parts.values())


def build_mesh(split: Parallel, world: World, *, keep_shard: bool = False) -> DeviceMesh:
    """The axes above 1 by name, and "shard" where nothing is split, or where asked for. Every rank must call it."""
    kept = "shard" if keep_shard else ""
    used = {axis: degree for axis, degree in degrees(split).items() if degree > 1 or axis == kept} or {"shard": 1}
    assert math.prod(used.values()) == world.size
    return init_device_mesh(world.device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Its axes replicate and shard, where they are."""
    axes = tuple(axis for axis in ("replicate", "shard") if axis in (mesh.mesh_dim_names or ()))
    if axes == mesh.mesh_dim_names:
        return mesh
    return mesh[axes] if len(axes) > 1 else mesh["".join(axes)]

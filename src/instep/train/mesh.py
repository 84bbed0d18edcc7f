"""The ranks as a grid, one axis per way to share the model."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from instep.records.parallel import Parallel
from instep.train.world import World


def build_mesh(parallel: Parallel, world: World) -> DeviceMesh:
    """replicate outside, shard inside, so that ranks that share parameters are neighbours. Every rank must call it."""
    assert parallel.replicate is not None and parallel.shard is not None
    if parallel.replicate == 1:
        return init_device_mesh(world.device.type, (parallel.shard,), mesh_dim_names=("shard",))
    shape = (parallel.replicate, parallel.shard)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))

"""How activations move over the ranks of the tensor axis, each with the backward that belongs to it.

An activation is whole and alike on every rank, a share of the last dim, or a stretch of another one; or a contribution,
of which the sum over ranks is meant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from instep.errors import UsageError


def enter(x: Tensor, mesh: DeviceMesh, sequence_dim: int | None = None) -> Tensor:
    """A whole activation comes to where each rank does its share; backward adds the ranks' gradients up.

    sequence_dim: where it comes in stretches along that dim.

    Raises UsageError for the output of a layer that was taken for the model's last one.
    """
    if isinstance(x, DTensor):
        raise UsageError(
            f"a layer got a DTensor of shape {tuple(x.shape)}, whose parts split_loss leaves on their ranks for cross_entropy, so "
            "another layer is the model's last one. Name it: Parallel(split_loss='head')."
        )
    if sequence_dim is not None:
        return bring_together(x, mesh, sequence_dim)
    return _spread(x, mesh, Replicate()).to_local(grad_placements=[Partial()])


def bring_together(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Stretches come to where each rank does its share of the whole; backward adds up and leaves each its stretch."""
    return _spread(x, mesh, Shard(dim)).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def add_up(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' contributions, whole on each."""
    return _whole(x, mesh, Partial())


def gather(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Parts along dim one after another, whole on each rank, to go on alike on all of them."""
    return _whole(x, mesh, Shard(dim % x.dim()))


def take_part(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's part along dim of a whole activation."""
    return _spread(x, mesh, Replicate()).redistribute(placements=[Shard(dim % x.dim())]).to_local()


def leave_stretch(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Of the sum of the ranks' contributions, this rank's stretch."""
    return _spread(x, mesh, Partial()).redistribute(placements=[Shard(dim)]).to_local()


def as_shares(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Shares of the last dim as one DTensor."""
    return _spread(x, mesh, Shard(x.dim() - 1))


def _spread(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Any:
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _whole(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    whole = _spread(x, mesh, placement).redistribute(placements=[Replicate()]).to_local()
    # The same numbers, which nobody else holds, but no view to autograd: FSDP2 warns of views that a model returns.
    return torch.ops.aten._unsafe_view.default(whole, whole.shape)

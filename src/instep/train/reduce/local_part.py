"""The part of a parameter or gradient that lies on this rank, and back to what PyTorch wants to see."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

TENSOR_AXIS = "tensor"


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_whole(local: Tensor, like: Tensor) -> Tensor:
    """A local part as the same kind of tensor as `like`, sharing its memory."""
    if not isinstance(like, DTensor):
        return local
    spec: Any = like
    return DTensor.from_local(
        local, spec.device_mesh, spec.placements, run_check=False, shape=like.size(), stride=like.stride()
    )


def is_cut(tensor: Tensor) -> bool:
    """Whether ranks along the tensor axis hold different parts; otherwise each of them holds the same."""
    if not isinstance(tensor, DTensor) or TENSOR_AXIS not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return not tensor.placements[names.index(TENSOR_AXIS)].is_replicate()


def settled(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the parameter's placement: autograd may leave sums over ranks to be done."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient

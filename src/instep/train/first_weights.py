"""Rank 0's weights on every rank, once it is sure that all came with the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from instep.errors import RanksDisagree
from instep.train.parts import check_plain
from instep.train.precision import autocast_forward
from instep.train.world import World


def prepare_model(
    model: nn.Module,
    world: World,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
    name: str,
    *,
    on_host: bool = False,
) -> list[Any]:
    """Moves the model to the device, checks that all ranks have the same one, and takes rank 0's weights.

    on_host: leave it there, since it may be larger than the device.
    Returns hooks to remove at the end. Every rank must call it. Raises UsageError for a wrapped model, RanksDisagree for models that differ.
    """
    check_plain(model)
    model.to("cpu" if on_host else world.device)
    group = world.host_group if on_host else group
    broadcast_weights(dict(model.named_parameters()) | dict(model.named_buffers()), world, group, name)
    return autocast_forward(model, world.device.type, dtype) if dtype is not None else []


def broadcast_weights(
    tensors: Mapping[str, torch.Tensor], world: World, group: dist.ProcessGroup | None, name: str
) -> None:
    """Gives every rank rank 0's values, by name. Raises RanksDisagree, naming the first difference."""
    if world.size == 1:
        return
    mine = {key: (tuple(t.shape), str(t.dtype), t.requires_grad) for key, t in tensors.items()}
    for rank, theirs in enumerate(world.gather_objects(mine, f"run.prepare of {name}")):
        difference = first_difference(world.rank, mine, rank, theirs)
        if difference:
            raise RanksDisagree(f"The ranks came with different models to run.prepare: {difference}")
    handles = []
    order = world.broadcast_object(list(tensors), f"run.prepare of {name}")  # rank 0's, since a set may order names
    with torch.no_grad():
        for key in order:
            tensor = tensors[key].detach()
            whole = tensor if tensor.is_contiguous() else tensor.contiguous()
            handles.append((dist.broadcast(whole, src=0, group=group, async_op=True), tensor, whole))
        for handle, tensor, whole in handles:
            world.wait(handle, f"run.prepare of {name}")
            if whole is not tensor:
                tensor.copy_(whole)


def first_difference(rank: int, mine: dict[str, Any], other: int, theirs: dict[str, Any]) -> str | None:
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            sides = sorted([(rank, mine.get(key)), (other, theirs.get(key))])
            return "; ".join(f"rank {r} has {_describe(key, value)}" for r, value in sides) + "."
    return None


def _describe(key: str, value: Any) -> str:
    if value is None:
        return f"no {key}"
    shape, dtype, requires_grad = value
    return f"{key} of shape {list(shape)}, {dtype.removeprefix('torch.')}, requires_grad={requires_grad}"


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Moves optimizer state that was made before the model moved."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                state[key] = value.to(parameter.device)

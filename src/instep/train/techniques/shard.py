"""Parameters shared out over ranks (ZeRO, Rajbhandari et al., 2020), on PyTorch's FSDP2.

Each block of the model gathers its parameters when it runs; gradients are reduce-scattered after backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from instep.errors import UsageError
from instep.train.arguments import Arguments
from instep.train.checkpoint.pieces import local_pieces
from instep.train.read_outside import watch_reads
from instep.train.reduce.local_part import as_whole
from instep.train.techniques.blocks import find_blocks


def shard_parameters(
    model: nn.Module, mesh: DeviceMesh, *, gathered: bool, policy: OffloadPolicy | None = None
) -> None:
    """Shards the model's repeated blocks, and the rest at the root, in place: parameters become DTensors.

    gathered: keep a block's parameters whole between forward and backward. Every rank must call it.
    """
    for unit in [*find_blocks(model), model]:
        # The root's parameters are needed first in backward, so FSDP2 keeps them in any case.
        fully_shard(unit, mesh=mesh, reshard_after_forward=not gathered, offload_policy=policy or OffloadPolicy())
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)  # sums; the mean over items is taken once, at the update
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
    watch_reads(model)


def check_shardable(arguments: Arguments) -> None:
    """Raises UsageError for arguments of Run that no sharded split can keep."""
    if arguments.exact:
        raise UsageError(
            "exact=True adds gradients in an order of its own and goes with 'ddp' and 'zero1' only. Leave one of them out."
        )
    if arguments.compress is not None:
        raise UsageError(
            f"compress={arguments.compress!r} is for gradients that every rank holds whole and goes with parallel='ddp' only. "
            "Leave one of them out."
        )


def sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def follow_sharding(
    optimizer: torch.optim.Optimizer, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]
) -> None:
    """Gives an optimizer that was built on the whole parameters the sharded ones, state included.

    before, after: the model's parameters by name. Raises UsageError for a parameter that is not the model's.
    """
    names = {id(parameter): name for name, parameter in before.items()}
    for group in optimizer.param_groups:
        for i, old in enumerate(group["params"]):
            if id(old) not in names:
                raise UsageError(
                    "a sharded split needs every parameter of the optimizer to belong to the model given with it; one of shape "
                    f"{tuple(old.shape)} does not. Make it a parameter of the model, or train with parallel='ddp'."
                )
            new = after[names[id(old)]]
            group["params"][i] = new
            if old in optimizer.state:
                optimizer.state[new] = {key: _like(value, old, new) for key, value in optimizer.state.pop(old).items()}


def _like(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """This rank's part of state that has the parameter's shape."""
    if isinstance(value, torch.Tensor) and value.shape == old.shape and isinstance(new, DTensor):
        local = torch.empty_like(new.to_local(), dtype=value.dtype)
        for piece in local_pieces(new):
            local.copy_(value[piece.slices])
        return as_whole(local, new)
    return value

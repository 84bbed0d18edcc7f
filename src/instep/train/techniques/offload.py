"""Parameters, gradients and optimizer state on the host, a block on the device while it runs (ZeRO-Offload, Ren et al.,
2021), on PyTorch's FSDP2. The optimizer steps on the host.
"""

from __future__ import annotations

import psutil
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from instep.errors import UsageError
from instep.records.parallel import Parallel
from instep.train.world import World
from instep.units import format_bytes

# Tensors of a parameter's size that a kind of optimizer keeps; one for kinds not named here.
STATES = {torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.NAdam: 2, torch.optim.RAdam: 2, torch.optim.SGD: 0}


def choose_policy(offload: bool, device: torch.device) -> OffloadPolicy:
    """Pinned memory lets copies run beside the computation; without a GPU there is none, and nothing to copy."""
    return CPUOffloadPolicy(pin_memory=has_own_memory(device)) if offload else OffloadPolicy()


def has_own_memory(device: torch.device) -> bool:
    """Whether the host's memory is another one, so that it makes a difference what lies there."""
    return device.type != "cpu"


def check_offload(asked: Parallel) -> None:
    """asked: the split before it was fitted to the number of ranks. Raises UsageError where offload cannot help."""
    if asked.shard == 1 and asked.pipeline == 1:
        raise UsageError(
            f"offload=True moves the parameters of a sharded model to the host, and {asked.describe()} shards none: take "
            "parallel='zero3' or 'zero2', or leave offload out."
        )


def check_host_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    split: Parallel,
    world: World,
    free_bytes: int | None = None,
) -> None:
    """Raises UsageError where the shards of all ranks on this machine do not fit into its free memory."""
    assert split.shard is not None and split.pipeline is not None
    needed = host_bytes(model, optimizer, split.shard * split.pipeline) * world.local_size
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    if needed > free:
        ranks = f"{world.local_size} rank{'s' if world.local_size > 1 else ''}"
        raise UsageError(
            f"offload=True needs about {format_bytes(needed)} of this machine's memory for the parameters, gradients and "
            f"optimizer state of {ranks}, and {format_bytes(free)} are free. Spread the ranks over more machines, or leave "
            "offload out."
        )


def host_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: int) -> int:
    """Of one rank with one of so many parts. Parameters that are on the host already take no more room."""
    moved = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type != "cpu")
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return (moved + trained * (1 + num_states(optimizer))) // parts


def num_states(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    group = optimizer.param_groups[0]
    return STATES.get(type(optimizer), 1) + sum(1 for name in ("momentum", "amsgrad") if group.get(name))

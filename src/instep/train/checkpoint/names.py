"""Plain names of a model's tensors, without what wrappers put in front."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# torch.compile, activation checkpointing and FSDP1 insert these anywhere in a name
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """`_orig_mod.block.0.weight` as `block.0.weight`."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DDP, DataParallel or torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # pyright: ignore[reportAssignmentType]
        else:
            return model

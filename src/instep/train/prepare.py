"""What `run.prepare` does to a model and its optimizer, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from instep.errors import RanksDisagree, UsageError
from instep.records.choice import Choice
from instep.train.precision import autocast_forward
from instep.train.world import World


def prepare_model(
    model: nn.Module, world: World, group: dist.ProcessGroup | None, dtype: torch.dtype | None, name: str
) -> list[Any]:
    """Moves the model to the device, checks that all ranks have the same one, and takes rank 0's weights.

    Returns hooks to remove at the end. Every rank must call it. Raises UsageError for a wrapped model, RanksDisagree for models that differ.
    """
    check_plain(model)
    model.to(world.device)
    broadcast_weights(dict(model.named_parameters()) | dict(model.named_buffers()), world, group, name)
    return autocast_forward(model, world.device.type, dtype) if dtype is not None else []


def check_plain(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"run.prepare got a {type(model).__name__} as its model; it takes a torch.nn.Module.")
    wrapped = type(model).__name__
    if wrapped in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise UsageError(f"run.prepare got a {wrapped}: it wants the plain model, and does the wrapper's work itself.")


def broadcast_weights(
    tensors: dict[str, torch.Tensor], world: World, group: dist.ProcessGroup | None, name: str
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


def check_optimizer(optimizer: object, models: Iterable[nn.Module]) -> None:
    """models: those prepared so far, the one that comes with the optimizer last."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"run.prepare got a {type(optimizer).__name__} as its optimizer; it takes a torch.optim.Optimizer."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "run.prepare cannot take LBFGS: it calls the model again within a step. Take a first-order optimizer."
        )
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "run.prepare got an optimizer without a parameter that requires a gradient: nothing would be trained."
        )
    models = list(models)
    taken = sum(len(group["params"]) for group in optimizer.param_groups)
    trainable = any(p.requires_grad for p in models[-1].parameters())  # a frozen model may go with a learned prompt
    if trainable and len(loose_parameters(optimizer, models)) == taken:
        raise UsageError(
            f"run.prepare got an optimizer that holds no parameter of its model, a {type(models[-1]).__name__}, so that would "
            "not be trained. Make it from model.parameters() after the last change of the model's parameters."
        )


def check_scheduler(scheduler: object, optimizer: torch.optim.Optimizer | None) -> None:
    if scheduler is None:
        return
    if optimizer is None:
        raise UsageError(
            "run.prepare got a scheduler without its optimizer: give both, run.prepare(model, optimizer, scheduler)."
        )
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise UsageError(
            f"run.prepare got a {type(scheduler).__name__} as its scheduler; it takes one of torch.optim.lr_scheduler, or "
            "an object with step()."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            f"run.prepare got a {type(scheduler).__name__} of another optimizer, so this one's learning rate would stay as it "
            "is. Give the two that belong together."
        )


def follow_parameters(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves optimizer state that was made before the model moved."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                state[key] = value.to(device)


def choose_fused(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> Choice | None:
    """Turns on the fused kernel where it is safe and nobody chose otherwise: 3x faster in AdamW on CPU, same formula."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    if type(optimizer) not in kinds or not all(map(_may_fuse, optimizer.param_groups)):
        return None
    if any(getattr(module, "sparse", False) is True for model in models for module in model.modules()):
        return None  # fused kernels take no sparse gradients
    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    if sharded and not isinstance(optimizer, torch.optim.Adam):
        return None  # torch 2.13 has the fused kernels of Adam and AdamW only for sharded parameters
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.defaults["fused"] = True
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as its own fused=True sets
    kind = type(optimizer).__name__
    return Choice("fused", True, f"{kind} steps in one pass over memory, by the same formula", f"{kind}(fused=False)")


def _may_fuse(group: dict[str, Any]) -> bool:
    return (
        group.get("fused", False) is None
        and group.get("foreach") is None
        and not any(group.get(name) for name in ("differentiable", "capturable"))
        and not isinstance(group.get("lr"), torch.Tensor)
        and all(_fits(p) for p in group["params"])
    )


def _fits(parameter: torch.Tensor) -> bool:
    kinds = ("cpu", "cuda")
    return parameter.is_floating_point() and parameter.layout == torch.strided and parameter.device.type in kinds


def loose_parameters(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """The optimizer's parameters that belong to no prepared model, by group and place."""
    known = {id(p) for model in models for p in model.parameters()}
    return {
        f"param_groups[{g}][{i}]": p
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if id(p) not in known
    }

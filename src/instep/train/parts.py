"""What a script gives to `run.prepare`, checked at the door."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from instep.errors import UsageError


def check_plain(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"run.prepare got a {type(model).__name__} as its model; it takes a torch.nn.Module.")
    wrapped = type(model).__name__
    if wrapped in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise UsageError(f"run.prepare got a {wrapped}: it wants the plain model, and does the wrapper's work itself.")


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


def loose_parameters(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The optimizer's parameters that belong to no prepared model, by group and place."""
    known = {id(p) for model in models for p in model.parameters()}
    return {
        f"param_groups[{g}][{i}]": p
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if id(p) not in known
    }

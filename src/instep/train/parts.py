"""What a script gives to `run.prepare`, checked at the door."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from instep.errors import UsageError
from instep.records.parallel import Parallel
from instep.train.call_arguments import show
from instep.train.techniques.block_options import BlockOptions
from instep.train.techniques.offload import has_own_memory

EVERY = ("step", "epoch")


@dataclass(frozen=True)
class Given:
    """The arguments of `run.prepare`. asked: the split as it was given; split: with all degrees as numbers; device: where the
    model runs."""

    model: Any
    optimizer: Any
    scheduler: Any
    every: Any
    sync_batch_norm: Any
    asked: Parallel
    split: Parallel
    options: BlockOptions
    device: torch.device

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the parameters: over several ranks, or to keep those of a stage, or of a rank that has all of
        them, on the host."""
        if self.split.shard != 1 or not self.options.offload:
            return self.split.shard != 1
        return self.split.pipeline != 1 or (self.asked.shard != 1 and has_own_memory(self.device))

    @property
    def returned(self) -> Any:
        """The same objects, as many as were given."""
        parts = tuple(part for part in (self.model, self.optimizer, self.scheduler) if part is not None)
        return parts if len(parts) > 1 else self.model


def check_every(every: object) -> None:
    if not isinstance(every, str) or every not in EVERY:
        raise UsageError(f"schedule_every={every!r} is not possible. Allowed: 'step', 'epoch'.")


def check_plain(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"run.prepare got {show(model)} as its model; it takes a torch.nn.Module.")
    wrapped = type(model).__name__
    if wrapped in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise UsageError(f"run.prepare got a {wrapped}: it wants the plain model, and does the wrapper's work itself.")
    check_values("run.prepare", model)


def check_values(call: str, model: nn.Module) -> None:
    """Raises UsageError for a model that was made without values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise UsageError(
                f"{call} got a {type(model).__name__} whose {name} has no shape yet: a lazy module learns it from its "
                "first input. Run the model on one batch before: model(inputs)."
            )
        if tensor.is_meta:
            raise UsageError(
                f"{call} got a {type(model).__name__} whose {name} is on the meta device, where tensors have a shape but "
                "no values. Make the model on a real device, or call model.to_empty(device='cpu') and load weights into it."
            )


def check_new(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, models: Iterable[nn.Module], others: Iterable[Any]
) -> bool:
    """Whether the model was not prepared before. models, others: those prepared so far, and their optimizers.

    A model may come again with an optimizer for parameters of it that no other trains.
    """
    is_new = not any(model is known for known in models)
    if optimizer is None:
        if not is_new:
            raise UsageError(
                f"run.prepare got the same {type(model).__name__} a second time. Prepare each model once, with its optimizer."
            )
        return is_new
    if not is_new and any(isinstance(p, DTensor) for p in model.parameters()):
        raise UsageError(
            f"run.prepare got the same {type(model).__name__} a second time, and it is shared out over ranks: such a model goes "
            "with one optimizer, given with it."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    for other in others:
        if other is optimizer:
            raise UsageError(
                f"run.prepare got the same {type(optimizer).__name__} a second time. Give one optimizer the parameters of all "
                "its models, or each model one of its own."
            )
        trained = {id(p) for group in other.param_groups for p in group["params"]}
        for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in trained):
            raise UsageError(
                f"run.prepare got a {type(optimizer).__name__} for {names.get(id(p), 'a parameter')}, which the "
                f"{type(other).__name__} prepared before trains already. In one run each parameter has one optimizer; to go on "
                "with another, open a second Run."
            )
    return is_new


def check_optimizer(optimizer: object, models: Iterable[nn.Module]) -> None:
    """models: those prepared so far, the one that comes with the optimizer last."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"run.prepare got {show(optimizer)} as its optimizer; it takes a torch.optim.Optimizer.")
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
            f"run.prepare got {show(scheduler)} as its scheduler; it takes one of torch.optim.lr_scheduler, or "
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

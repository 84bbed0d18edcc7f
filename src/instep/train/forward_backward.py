"""`step.forward_backward(model, loss_fn)`: the inner loop in one call, which every split knows how to run.

How a micro-batch is taken apart: a pair is (inputs, targets), a mapping is keyword arguments, anything else is the
model's one input and the target as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from instep.errors import UsageError
from instep.train.call_arguments import show


def take_apart(model: Callable[..., Any], batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and keyword arguments of the model, and what the loss is computed from beside its output.

    Inputs that are a tuple or a list are several arguments, those that are a mapping keyword arguments. Of a batch that
    is a mapping the model gets the keys that its forward names. Raises UsageError for a tuple of another length than 2.
    """
    if isinstance(batch, Mapping):
        return (), _named(model, batch), batch
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}, batch
    if len(batch) != 2:
        raise UsageError(
            f"step.forward_backward got a micro-batch of {len(batch)} parts; it takes a pair (inputs, targets), a mapping, or "
            "one tensor. Bring it into that form in the dataset or its collate_fn: ((x, mask), y) for two inputs."
        )
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs), targets
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}, targets
    return (inputs,), {}, targets


def _named(model: Callable[..., Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(batch)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    taken = {key: value for key, value in batch.items() if key in names}
    if not taken:
        raise UsageError(
            f"step.forward_backward got a micro-batch with the keys {', '.join(map(repr, batch))}, none of which the model's "
            f"forward takes ({', '.join(map(repr, names)) or 'nothing by name'})."
        )
    return taken


def read_loss(found: Any) -> tuple[Any, Any]:
    """The loss and its weight, None for the number of samples. Raises UsageError."""
    if isinstance(found, Tensor):
        return found, None
    if isinstance(found, (tuple, list)) and len(found) == 2:
        return found[0], found[1]
    raise UsageError(
        f"step.forward_backward: loss_fn returned {show(found)}; it has to return the loss, a tensor of shape (), "
        "or a pair (loss, weight) where the loss is a mean over `weight` items."
    )


def check_functions(model: Any, loss_fn: Any) -> None:
    """Raises UsageError for what cannot be called."""
    if not callable(model):
        raise UsageError(
            f"step.forward_backward got {show(model)} as its model; it takes the model that run.prepare was given."
        )
    if not callable(loss_fn):
        raise UsageError(
            f"step.forward_backward got {show(loss_fn)} as its loss_fn; it takes a function of the model's output "
            "and the targets, as torch.nn.functional.cross_entropy."
        )

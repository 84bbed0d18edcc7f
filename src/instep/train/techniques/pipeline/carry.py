"""What goes from a stage to the next: activations, and the states of the random generators that forward draws from.

The next stage draws on where this one stopped, as one process would, so that dropout masks do not depend on the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from instep.errors import UsageError
from instep.train.techniques.pipeline.generators import read_states
from instep.train.techniques.pipeline.trace import Carried


def with_states(carried: Sequence[Carried], draws: tuple[str, ...], device: torch.device) -> tuple[Carried, ...]:
    """What is sent: the activations, and behind them the states of the generators that are needed."""
    if not draws:
        return tuple(carried)
    states = read_states(draws, device)
    return (*carried, Carried(tuple(states.shape), states.dtype, False))


def for_split_backward(carried: Sequence[Carried]) -> tuple[Carried, ...]:
    """With gradients for all activations, also behind frozen stages: torch's zero-bubble schedules find the gradients of a
    stage's parameters from those of its inputs, and silently leave them out where no input has any."""
    return tuple(replace(each, requires_grad=each.dtype.is_floating_point) for each in carried)


class _Behind(torch.autograd.Function):
    """A tensor as it is, as if it had come from another one as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def behind(tensors: Sequence[Tensor], received: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that leave a stage, all as results of what it received: torch's zero-bubble schedules look for a parameter's
    gradient where its way meets that of an input, and silently drop what comes back over an output (a learned bias, given to
    every layer) that no input has gone into."""
    root = next((tensor for tensor in received if tensor.requires_grad), None)
    if root is None:
        return list(tensors)
    return [_Behind.apply(tensor, root) if tensor.requires_grad else tensor for tensor in tensors]


def pack(
    tensors: Sequence[Tensor], carried: Sequence[Carried], draws: tuple[str, ...], device: torch.device
) -> tuple[Tensor, ...]:
    """Tensors that can be sent: contiguous, and none a view, which torch's zero-bubble schedules cannot detach."""
    found = [_own(tensor, each) for tensor, each in zip(tensors, carried, strict=True)]
    if draws:
        found.append(read_states(draws, device))
    return tuple(found)


def _own(tensor: Tensor, planned: Carried) -> Tensor:
    if tuple(tensor.shape) != planned.shape or tensor.dtype != planned.dtype:
        raise UsageError(
            f"a stage of the pipeline gave a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype} where inputs of these "
            f"shapes give {planned.shape} and {planned.dtype}: forward may not decide shapes by values. Pad to one shape, or name "
            "cut points where the shapes are settled, as Parallel(cut=['layers.4'])."
        )
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    is_own = not tensor.requires_grad or not (tensor._is_view() or tensor.is_leaf)
    return tensor if is_own else tensor.clone()

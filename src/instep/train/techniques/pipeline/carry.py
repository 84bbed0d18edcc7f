"""What goes from a stage to the next: activations, and the state of the random generator.

The next stage draws on where this one stopped, as one process would, so that dropout masks do not depend on the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from instep.errors import UsageError
from instep.train.techniques.pipeline.trace import Carried


def rng_state(device: torch.device) -> Tensor:
    """Of the generator that operators on this device draw from, as bytes on the host."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_rng_state(state: Tensor | None) -> None:
    """None changes nothing: no operator of the model draws."""
    if state is None:
        return
    if state.device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state.cpu(), state.device)


def with_state(carried: Sequence[Carried], draws: bool, device: torch.device) -> tuple[Carried, ...]:
    """What is sent: the activations, and behind them the generator's state where it is needed."""
    if not draws:
        return tuple(carried)
    state = rng_state(device)
    return (*carried, Carried(tuple(state.shape), state.dtype, False))


def for_split_backward(carried: Sequence[Carried]) -> tuple[Carried, ...]:
    """With gradients for all activations, also behind frozen stages: torch's zero-bubble schedules find the gradients of a
    stage's parameters from those of its inputs, and silently leave them out where no input has any."""
    return tuple(replace(each, requires_grad=each.dtype.is_floating_point) for each in carried)


def pack(
    tensors: Sequence[Tensor], carried: Sequence[Carried], draws: bool, device: torch.device
) -> tuple[Tensor, ...]:
    """Tensors that can be sent: contiguous, and none a view, which torch's zero-bubble schedules cannot detach."""
    found = [_own(tensor, each) for tensor, each in zip(tensors, carried, strict=True)]
    if draws:
        found.append(rng_state(device).to(device))
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

"""Steps an optimizer on the parts of split parameters that lie on this rank.

PyTorch's optimizers that treat each element by itself give the same numbers on a part as on the whole. Plain tensors cost
them no dispatch per operation, may be mixed with unsplit ones in one fused call, and every fused kernel takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from instep.train.reduce.local_part import as_whole, local_part

ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop),
)


def steps_on_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Of a subclass nobody knows what it does with a whole matrix."""
    return type(optimizer) in ELEMENTWISE


@contextmanager
def on_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer's split parameters, their gradients and state are this rank's parts, in the same memory."""
    if not steps_on_parts(optimizer):
        yield
        return
    swapped: list[tuple[list[Any], int, DTensor, nn.Parameter]] = []
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            if isinstance(parameter, DTensor):
                swapped.append((group["params"], i, parameter, _part(parameter)))
    for params, i, parameter, part in swapped:
        params[i] = part
        if parameter in optimizer.state:
            optimizer.state[part] = {key: _local(value) for key, value in optimizer.state.pop(parameter).items()}
    try:
        yield
    finally:
        for params, i, parameter, part in swapped:
            params[i] = parameter
            if part in optimizer.state:
                state = optimizer.state.pop(part)
                optimizer.state[parameter] = {key: _like(value, parameter, part) for key, value in state.items()}


def _part(parameter: DTensor) -> nn.Parameter:
    part = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        part.grad = local_part(parameter.grad)
    return part


def _local(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


def _like(value: Any, parameter: DTensor, part: Tensor) -> Any:
    """State of the parameter's shape belongs to the whole again; counts stay numbers."""
    has_shape = isinstance(value, Tensor) and value.dim() > 0 and value.shape == part.shape
    return as_whole(value, parameter) if has_shape else value

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
    places = [(group["params"], i) for group in optimizer.param_groups for i in range(len(group["params"]))]
    swapped = [_Swapped(params, i) for params, i in places if isinstance(params[i], DTensor)]
    for each in swapped:
        each.take_apart(optimizer)
    try:
        yield
    finally:
        for each in swapped:
            each.put_together(optimizer)


class _Swapped:
    """A split parameter in its group, and what the optimizer keeps for it."""

    def __init__(self, params: list[Any], i: int) -> None:
        self._params, self._i, self._whole, self._part = params, i, params[i], _part(params[i])
        self._state: dict[str, Any] = {}
        self._local: dict[str, Any] = {}

    def take_apart(self, optimizer: torch.optim.Optimizer) -> None:
        self._params[self._i] = self._part
        if self._whole in optimizer.state:
            self._state = optimizer.state.pop(self._whole)
            self._local = {key: _local(value) for key, value in self._state.items()}
            optimizer.state[self._part] = dict(self._local)

    def put_together(self, optimizer: torch.optim.Optimizer) -> None:
        """Values that were changed in place stay as they were: to make a DTensor costs more than to step a small one."""
        self._params[self._i] = self._whole
        if self._part in optimizer.state:
            state = optimizer.state.pop(self._part)
            optimizer.state[self._whole] = {key: self._like(key, value) for key, value in state.items()}

    def _like(self, key: str, value: Any) -> Any:
        is_same = key in self._state and value is self._local[key]
        return self._state[key] if is_same else _like(value, self._whole, self._part)


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

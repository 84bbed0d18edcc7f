"""Tensors without numbers, which know shape, type and device: what a stage sees of the stages before it.

Private in torch (`torch._subclasses`), so only here; a test notices a change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

from instep.errors import UsageError

# reading a number that is not there, or an operator without a rule for shapes
CANNOT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def new_mode() -> FakeTensorMode:
    """A world of fakes of its own: fakes of two modes do not mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def has_fake(value: Any) -> bool:
    return tree_any(is_fake, value)


def fake_like(mode: FakeTensorMode, tensor: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
    """A new fake, contiguous, a leaf."""
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).requires_grad_(requires_grad)


def cut_off(value: Any) -> Any:
    """The same fakes without the graph behind them."""
    return tree_map(lambda v: v.detach().requires_grad_(v.requires_grad) if is_fake(v) else v, value)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raises UsageError, beginning with `what`, for what cannot be done without numbers."""
    try:
        yield
    except CANNOT as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{what}: its forward decides by the values of what another stage computes ({text}), which are not there. Name cut "
            "points behind that place, as Parallel(cut=['layers.4'])."
        ) from error
    except AssertionError as error:
        if "fake mode" not in str(error).lower():
            raise
        raise UsageError(
            f"{what}: something of one stage is used in a later one without being an argument of the module that begins it. "
            "Pass it on as an argument, or name other cut points, as Parallel(cut=['layers.4'])."
        ) from error


class Draws(TorchDispatchMode):
    """Notices whether an operator draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))

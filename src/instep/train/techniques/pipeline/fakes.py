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
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from instep.errors import UsageError

# reading a number that is not there, or an operator without a rule for shapes
CANNOT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Mixed(Exception):
    """Fakes of two modes, that is of two stages, came together."""


def modes_of(value: Any) -> set[int]:
    return {id(leaf.fake_mode) for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor)}


def new_mode() -> FakeTensorMode:
    """A world of fakes of its own. torch lets fakes of two modes meet; `Watch` does not."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def has_fake(value: Any) -> bool:
    return tree_any(is_fake, value)


def fake_like(mode: FakeTensorMode, tensor: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
    """A new fake, contiguous, a leaf."""
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).requires_grad_(requires_grad)


def without_graph(value: Any) -> Any:
    """The same fakes, requiring no gradient, so that they may be used over and over and written in place."""
    return tree_map(lambda v: v.detach() if is_fake(v) else v, value)


def with_short_graph(value: Any) -> Any:
    """New fakes like these behind one operator: like a result, and no leaf, which may not be written in place."""
    own = lambda v: v.detach().requires_grad_().clone() if v.requires_grad else v.detach()  # noqa: E731
    return tree_map(lambda v: own(v) if is_fake(v) else v, value)


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
    except RuntimeError as error:
        if "different devices" not in str(error):
            raise
        raise UsageError(
            f"{what}: forward uses a parameter of another module itself, as F.linear(x, self.embedding.weight) does, and not by "
            "calling the module that has it. Give the parameter to a module of its own (tied weights are kept), and call that."
        ) from error
    except Mixed as error:
        raise UsageError(
            f"{what}: something of one stage is used in a later one without being an argument of the module that begins it. "
            "Pass it on as an argument, give a weight that both use to a module of each (tied weights are kept), or name other cut "
            "points, as Parallel(cut=['layers.4'])."
        ) from error


class Watch(TorchDispatchMode):
    """Notices whether an operator draws random numbers, and one that takes fakes of two modes."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if len(modes_of((args, kwargs))) > 1:
            raise Mixed
        return func(*args, **(kwargs or {}))

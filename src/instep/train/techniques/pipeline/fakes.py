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
from instep.train.call_site import say_site, site_of

CANNOT = (DataDependentOutputException, DynamicOutputShapeException)  # reading a number that is not there


# what torch says of fakes that are read outside of its operators
READS = (".numpy() is not supported", "unsupported format string passed to FakeTensor")


class Mixed(Exception):
    """Fakes of two modes, that is of two stages, came together."""


class CannotCut(Exception):
    """Raised where a forward does what no cut allows. what: it does; then: what follows the line where; advice: a sentence."""

    def __init__(self, what: str, advice: str, then: str = "") -> None:
        super().__init__(what)
        self.what, self.advice, self.then = what, advice, then


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
    """Raises UsageError, beginning with `what` and with the line of forward, for what cannot be done without numbers."""
    try:
        yield
    except (CannotCut, Mixed, RuntimeError, TypeError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise UsageError(f"{what}: {reason.what}{say_site(site_of(error))}{reason.then}. {reason.advice}") from error


def _reason(error: Exception) -> CannotCut | None:
    if isinstance(error, CannotCut):
        return error
    if isinstance(error, CANNOT) or any(text in str(error) for text in READS):
        return CannotCut(
            "its forward needs the values of what another stage computes",
            "Name cut points behind that place, as Parallel(cut=['layers.4']).",
            ", which are not there",
        )
    if isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error):
        return CannotCut(
            "forward calls an operator",
            "Its author says so with its register_fake, see torch.library.",
            f" of which torch does not know what shapes it gives ({str(error).splitlines()[0].rstrip('.')})",
        )
    if isinstance(error, RuntimeError) and "different devices" in str(error):
        return CannotCut(
            "forward uses a parameter of another module itself",
            "Give the parameter to a module of its own (tied weights are kept), and call that.",
            ", as F.linear(x, self.embedding.weight) does, and not by calling the module that has it",
        )
    if isinstance(error, Mixed):
        return CannotCut(
            "something of one stage is used in a later one",
            "Pass it on as an argument, give a weight that both use to a module of each (tied weights are kept), or name other "
            "cut points, as Parallel(cut=['layers.4']).",
            " without being an argument of the module that begins it",
        )
    return None


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

"""Parameters and buffers that other ranks hold, and what a script computes from them: shapes without numbers.

torch lets such tensors (device meta) go far: an average that they are added to stays as it was, a file gets them without
their numbers, and an error comes late, about a device that the script never named. So each of them, and each result,
knows which parameter it comes from, and what would need its numbers is refused with that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from instep.errors import UsageError
from instep.records.finding import CallSite
from instep.train.call_site import say_site, user_call_site

PENALTY = "A penalty on weights is the optimizer's weight_decay, or is added to param.grad between step.reduce() and step.update()."
_INTO = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")  # write their first argument
_MOVES = ("to", "cpu", "cuda")


@dataclass(frozen=True)
class Origin:
    """name: of the parameter, or of its gradient; holder: a rank that has it; rank: this one; read: where a script has computed
    from it."""

    name: str
    holder: int
    rank: int
    read: CallSite | None = None

    def here(self) -> Origin:
        return self if self.read is not None else replace(self, read=user_call_site())


class WithoutNumbers(Tensor):
    """Computed from a tensor of another rank."""

    origin: Origin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check_targets(func, args, kwargs)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower():
                raise
            raise _refusal(_origin_in((args, kwargs)), getattr(func, "__name__", "")) from error
        if not isinstance(result, (Tensor, tuple, list)) or isinstance(result, torch.Size):
            return result
        origin: list[Origin] = []

        def mark(tensor: Tensor) -> Tensor:
            if not tensor.is_meta or isinstance(tensor, WithoutNumbers):
                return tensor
            marked: Any = tensor.as_subclass(WithoutNumbers)
            origin[:] = origin or [_origin_in((args, kwargs)).here()]
            marked.origin = origin[0]
            return marked

        with torch._C.DisableTorchFunctionSubclass():
            return tree_map_only(Tensor, mark, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            copied: Any = self.detach().as_subclass(WithoutNumbers)
        copied.origin = self.origin
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self.origin)

    def __format__(self, spec: str) -> str:
        if spec:
            raise _refusal(self.origin)
        return repr(self)


class Absent(WithoutNumbers, nn.Parameter):
    """Stands in a model for a tensor of another rank: shape, type and whether it is trained, but no numbers."""

    @staticmethod
    def of(tensor: Tensor, origin: Origin) -> Absent:
        with torch._C.DisableTorchFunctionSubclass():
            empty = torch.empty_like(tensor, device="meta").as_subclass(Tensor)
            absent = Absent(empty, requires_grad=tensor.requires_grad)
        absent.origin = origin
        return absent

    has_gradient = False  # there is one on the rank that holds it, final

    @property
    def grad(self) -> WithoutNumbers | None:  # type: ignore[override]
        """None at no cost where optimizers ask for it, in every step. What is put there is dropped."""
        if not self.has_gradient or not self.requires_grad:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            gradient: Any = torch.empty_like(self, requires_grad=False).as_subclass(WithoutNumbers)
        gradient.origin = replace(self.origin, name=f"{self.origin.name}.grad")
        return gradient  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: object) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), Absent.of(self, self.origin))


def is_absent(tensor: object) -> bool:
    return isinstance(tensor, WithoutNumbers)


def show_gradients(parameters: Iterable[Tensor], *, are_final: bool) -> None:
    """Whether gradients of parameters of other ranks are to be seen, for code of the user's that goes over all of them."""
    for parameter in parameters:
        if isinstance(parameter, Absent):
            parameter.has_gradient = are_final


def check_there(value: object) -> None:
    """Raises UsageError for what was computed from a parameter that another rank holds."""
    if isinstance(value, WithoutNumbers):
        raise _refusal(value.origin)


def check_loss(loss: object) -> None:
    """Raises UsageError for a loss that reads what another rank holds."""
    if isinstance(loss, WithoutNumbers):
        at = say_site(loss.origin.here().read)
        layer = loss.origin.name.rpartition(".")[0] or loss.origin.name
        raise UsageError(
            f"{loss.origin.name} is read by the loss{at}, and {_say_who(loss.origin)}. Compute with it inside the forward of "
            f"{layer}. {PENALTY}"
        )


def _check_targets(func: Any, args: Any, kwargs: Any) -> None:
    """Raises UsageError where numbers that are here would be changed by some that are not: torch leaves them as they were."""
    name = getattr(func, "__name__", "")
    writes_first = name in _INTO or (name.endswith("_") and not name.endswith("__"))
    pairs = [*_pairs(args)] if writes_first else []
    if "out" in kwargs:
        pairs += [(target, args) for target in tree_iter(kwargs["out"])]
    for target, others in pairs:
        if isinstance(target, Tensor) and not isinstance(target, WithoutNumbers):
            found = next((each for each in tree_iter(others) if isinstance(each, WithoutNumbers)), None)
            if found is not None:
                raise _refusal(found.origin, name)


def _pairs(args: Any) -> Iterator[tuple[Any, Any]]:
    """What is written, and what goes there; element by element where torch takes lists (`torch._foreach_add_`)."""
    first, *others = args
    if not isinstance(first, (tuple, list)):
        yield first, others
        return
    for i, target in enumerate(first):
        alike = [
            other[i] if isinstance(other, (tuple, list)) and len(other) == len(first) else other for other in others
        ]
        yield target, alike


def _origin_in(value: Any) -> Origin:
    return next(each.origin for each in tree_iter(value) if isinstance(each, WithoutNumbers))


def _refusal(origin: Origin, function: str = "") -> UsageError:
    verb = "moved" if function in _MOVES and origin.read is None else "read"
    origin = origin.here()
    advice = "run.export(path), called by every rank, writes all weights to one file"
    if origin.name.endswith(".grad"):
        advice = "Run(clip_norm=...) clips by the norm over all ranks, which is step.grad_norm after the update"
    return UsageError(
        f"{origin.name} is {verb}{say_site(origin.read)}, and {_say_who(origin)}. {advice}; parameters that this rank holds itself have "
        "is_meta=False."
    )


def _say_who(origin: Origin) -> str:
    return f"rank {origin.holder} holds it: rank {origin.rank} has other parts of the pipeline"

"""Backward passes: the loss, and each rank's own gradients before anything averages them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instep.verify.record.forwards import Calls
from instep.verify.record.generators import random_state
from instep.verify.record.patch import replace
from instep.verify.record.pieces import is_piece
from instep.verify.record.prints import print_tensor
from instep.verify.record.state import Recording, users_line


class Scaling:
    """Loss scaling: the factor of each scaled loss, and whether gradients are still multiplied by it."""

    def __init__(self) -> None:
        self.factors: dict[int, float] = {}  # by the id of the scaled loss
        self.factor = 1.0
        self.pending = False  # scaled, not unscaled yet
        self.line = ""


def record_gradients(recording: Recording, calls: Calls) -> Scaling:
    scaling = Scaling()
    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    replace((torch.autograd,), "backward", lambda original: _wrap_backward(recording, calls, scaling, original))
    replace((torch.optim.Optimizer,), "add_param_group", lambda original: _wrap_group(recording, seen, original))
    replace((torch.optim.Optimizer,), "zero_grad", lambda original: _wrap_zero(recording, original))
    replace((nn.Module,), "zero_grad", lambda original: _wrap_zero(recording, original))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        owners = (nn.utils.clip_grad, nn.utils)
        replace(owners, name, lambda original, name=name: _wrap_clip(recording, scaling, name, original))
    replace((torch.amp.GradScaler,), "scale", lambda original: _wrap_scale(recording, scaling, original))
    replace((torch.amp.GradScaler,), "unscale_", lambda original: _wrap_unscale(recording, scaling, original))
    replace((torch.amp.GradScaler,), "update", lambda original: _wrap_scale_update(scaling, original))
    return scaling


def _wrap_backward(
    recording: Recording, calls: Calls, scaling: Scaling, original: Callable[..., Any]
) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or recording.closed:
            return original(tensors, *args, **kwargs)
        if recording.is_done and not recording.wants_next_epoch():
            recording.end_script()
        recording.step["draws"] |= bool(recording.seen_random) and random_state() != recording.seen_random
        _note_loss(recording, scaling, tensors)
        recording.reduced.clear()  # taken before this pass, as by clipping in the middle of a group
        calls.in_backward = True
        try:
            return original(tensors, *args, **kwargs)
        finally:
            calls.in_backward = False

    return backward


def _note_loss(recording: Recording, scaling: Scaling, tensors: Any) -> None:
    if not isinstance(tensors, torch.Tensor) or tensors.numel() != 1:
        recording.step["backwards"].append({"loss": None, "scale": 1.0, "divisor": None, "synced": None, "line": ""})
        return
    scale = scaling.factors.pop(id(tensors), 1.0)
    recording.step["backwards"].append(
        {
            "loss": float(tensors.detach()) / scale,
            "scale": scale,
            "divisor": find_divisor(tensors, scale),
            "synced": recording.step["synced"],
            "line": users_line(2),
        }
    )


def find_divisor(loss: torch.Tensor, scale: float = 1.0) -> float | None:
    """The constant that a loss was divided by last, as `loss / 4` and `loss * 0.25` are; None when by none.

    Reads what autograd keeps of the last operation, which is private; without it nothing is known.
    """
    node = loss.grad_fn
    if scale != 1.0 and node is not None and node.name() == "MulBackward0":
        node = node.next_functions[0][0]  # the multiplication by the loss scale
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return None
    other = getattr(node, "_saved_other", None)
    takes_part = len(node.next_functions) > 1 and node.next_functions[1][0] is not None
    if not isinstance(other, torch.Tensor) or other.numel() != 1 or takes_part or not float(other):
        return None
    return float(other) if node.name() == "DivBackward0" else 1.0 / float(other)


def _wrap_group(recording: Recording, seen: weakref.WeakSet[Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        if recording.uses_run:
            return
        for parameter in self.param_groups[-1]["params"]:
            watch_parameter(recording, parameter)

    return add_param_group


def watch_parameter(recording: Recording, parameter: torch.nn.Parameter) -> None:
    """Adds up what this rank's backward passes give for the parameter since its gradient was last cleared."""
    is_sharded = hasattr(parameter, "full_tensor") or is_piece(parameter)
    if not parameter.requires_grad or not parameter.is_leaf or is_sharded or hasattr(parameter, "_instep_recorded"):
        return
    parameter._instep_recorded = True  # type: ignore[attr-defined]
    key = id(parameter)
    reference = weakref.ref(parameter)
    recording.watched.append(reference)

    def add(gradient: torch.Tensor) -> None:
        owner = reference()
        if recording.closed or recording.is_done or owner is None or torch.compiler.is_compiling():
            return
        print_ = print_tensor(gradient)
        cleared = owner.grad is None or key not in recording.local
        recording.local[key] = print_ if cleared else recording.local[key] + print_

    parameter.register_hook(add)


def _wrap_zero(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        groups = self.param_groups if isinstance(self, torch.optim.Optimizer) else [{"params": self.parameters()}]
        if recording.local:
            for group in groups:
                for parameter in group["params"]:
                    recording.local.pop(id(parameter), None)
        return original(self, *args, **kwargs)

    return zero_grad


def capture_reduced(recording: Recording, parameters: Any) -> None:
    """The gradients as they are now, unless they were taken before: after averaging, before clipping and unscaling."""
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in recording.reduced and not is_piece(parameter):
            recording.reduced[id(parameter)] = print_tensor(parameter.grad)


def _wrap_clip(recording: Recording, scaling: Scaling, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not recording.closed and not recording.is_done:
            capture_reduced(recording, given)
            fact = {"call": name, "line": users_line(), "scaled": scaling.pending, "scale_line": scaling.line}
            recording.step["clips"].append(fact | {"scale": scaling.factor})
        return original(given, *args, **kwargs)

    return clip


def _wrap_scale(recording: Recording, scaling: Scaling, original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        if self.is_enabled() and isinstance(result, torch.Tensor):
            scaling.factor = self.get_scale()
            scaling.factors = {id(result): scaling.factor}
            scaling.pending, scaling.line = True, users_line()
        return result

    return scale


def _wrap_unscale(recording: Recording, scaling: Scaling, original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_(self: Any, optimizer: torch.optim.Optimizer) -> None:
        if not recording.closed and not recording.is_done:
            capture_reduced(recording, (p for group in optimizer.param_groups for p in group["params"]))
        scaling.pending = False
        original(self, optimizer)

    return unscale_


def _wrap_scale_update(scaling: Scaling, original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        scaling.pending = False
        return original(self, *args, **kwargs)

    return update


def wrapper_of(parameters: set[int], wrapped: list[Any]) -> tuple[DistributedDataParallel, set[int], str] | None:
    """The DistributedDataParallel that holds one of these parameters, its parameters when it was made, and its line."""
    for reference, ids, line in reversed(wrapped):
        model = reference()
        if model is not None and (ids & parameters or {id(p) for p in model.parameters()} & parameters):
            return model, ids, line
    return None

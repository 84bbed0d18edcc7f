"""Collectives that the script calls itself: small sums, as of metrics, and features gathered without their graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from instep.verify.record.patch import replace
from instep.verify.record.state import Recording, users_line

_MOST_NUMBERS = 16
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single")


def record_traffic(recording: Recording) -> None:
    owners = (dist, distributed_c10d)
    for name in ("all_reduce", "reduce"):
        replace(owners, name, lambda original, name=name: _wrap_sum(recording, name, original))
    for name in _GATHERS:
        replace(owners, name, lambda original: _wrap_gather(recording, original))
    replace((torch.nn.functional,), "cross_entropy", lambda original: _wrap_loss(recording, original))
    replace((torch.nn.functional,), "nll_loss", lambda original: _wrap_loss(recording, original))
    replace((torch.nn.Module,), "load_state_dict", lambda original: _wrap_load(recording, original))


def _wrap_sum(recording: Recording, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        small = _is_metric(recording, tensor) and not recording.closed and not kwargs.get("async_op")
        line = users_line() if small else ""
        before = tensor.detach().reshape(-1).double().tolist() if line else []
        result = original(tensor, *args, **kwargs)
        if line:
            after = tensor.detach().reshape(-1).double().tolist()
            if all(map(math.isfinite, before + after)):
                operation = str(kwargs.get("op", args[0] if args and name == "all_reduce" else "SUM"))
                fact = {"line": line, "call": name, "before": before, "after": after, "op": operation.split(".")[-1]}
                recording.step["metrics"].append(fact)
        return result

    return reduce


def _is_metric(recording: Recording, tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.numel() <= _MOST_NUMBERS
        and not isinstance(tensor, torch.nn.Parameter)
        and not tensor.requires_grad
        and not tensor.is_complex()
        and not any((owner := one()) is not None and owner.grad is tensor for one in recording.watched)
    )


def _wrap_gather(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def gather(output: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        has_graph = isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.dim() > 1
        if has_graph and torch.is_grad_enabled() and not recording.closed:
            recording.step["gathered"].append({"line": users_line(), "shape": list(tensor.shape)})
        return original(output, tensor, *args, **kwargs)

    return gather


def _wrap_loss(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not recording.closed:
            _count_targets(recording, target, args, kwargs)
        return original(input, target, *args, **kwargs)

    return loss


def _count_targets(recording: Recording, target: Any, args: Any, kwargs: Any) -> None:
    """How many targets a mean is taken over, where some are left out."""
    if kwargs.get("reduction", "mean") != "mean" or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return
    ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 and isinstance(args[2], int) else -100)
    counted = int((target != ignored).sum())
    if counted < target.numel():
        line = users_line(2)
        if not any(one["line"] == line for one in recording.step["tokens"]):
            recording.step["tokens"].append({"line": line, "counted": 0, "total": 0})
        entry = next(one for one in recording.step["tokens"] if one["line"] == line)
        entry["counted"] += counted
        entry["total"] += target.numel()


def _wrap_load(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        line = users_line()
        result = original(self, *args, **kwargs)
        if any(True for _ in self.parameters()):
            recording.note("load", line=line)
        return result

    return load_state_dict

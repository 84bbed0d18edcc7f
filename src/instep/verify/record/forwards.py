"""Calls of models and of their wrappers: the inputs, the generator's state, dropout."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instep.verify.record.generators import device_state
from instep.verify.record.patch import replace
from instep.verify.record.samples import tensors_in
from instep.verify.record.state import Recording, users_line

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class Calls:
    """How deep in modules this rank is, and which modules train."""

    def __init__(self) -> None:
        self.depth = 0
        self.trains: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self.in_backward = False

    def has_parameters(self, module: nn.Module) -> bool:
        known = self.trains.get(module)
        if known is None:
            known = self.trains[module] = any(p.requires_grad for p in module.parameters())
        return known


def record_forwards(recording: Recording) -> Calls:
    calls = Calls()
    replace((nn.Module,), "__call__", lambda original: _wrap_call(recording, calls, original))
    replace((DistributedDataParallel,), "forward", lambda original: _wrap_wrapped(recording, original))
    replace((DistributedDataParallel,), "__init__", lambda original: _wrap_wrapping(recording, original))
    replace((DistributedDataParallel,), "no_sync", lambda original: _wrap_no_sync(recording, original))
    for name in _DROPOUTS:
        replace((nn.functional,), name, lambda original: _wrap_dropout(recording, original))
    replace((torch,), "dropout", lambda original: _wrap_plain_dropout(recording, original))
    replace((nn.functional,), "scaled_dot_product_attention", lambda original: _wrap_attention(recording, original))
    return calls


def _wrap_call(recording: Recording, calls: Calls, original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or calls.depth or calls.in_backward or recording.closed:
            return original(self, *args, **kwargs)
        counts = torch.is_grad_enabled() and self.training and calls.has_parameters(self)
        rows = _enter(recording, self, args, kwargs) if counts else 0
        calls.depth = 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            calls.depth = 0
        if counts:
            _leave(recording, result, rows)
        return result

    return __call__


def _enter(recording: Recording, module: nn.Module, args: Any, kwargs: Any) -> int:
    step = recording.step
    if not any(module is known for known in recording.models):
        recording.models.append(module)
    rows = recording.samples.enter((args, kwargs))
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    step["random"] = step["random"] or device_state(device)
    step["forwards"] += 1
    step["batch_norm"] = step["batch_norm"] or has_local_batch_norm(module)
    if torch.is_autocast_enabled(device.type):
        step["low_precision"] = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    if not recording.options.keep_random and not recording.uses_run:
        for part in module.modules():
            if isinstance(part, nn.RNNBase) and part.dropout:
                part.dropout = 0.0
                step["drops"] = True
    return rows


def _leave(recording: Recording, result: Any, rows: int) -> None:
    outputs = [one for one in tensors_in(result) if one.requires_grad]
    if rows and outputs:
        recording.step["outputs"] = max(recording.step["outputs"], sum(one.numel() for one in outputs) // rows)


def has_local_batch_norm(module: nn.Module) -> bool:
    """Whether it takes statistics over the rows of one call."""
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm)
        and not isinstance(part, nn.SyncBatchNorm)
        and (part.training or part.running_mean is None)
        for part in module.modules()
    )


def _wrap_wrapped(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not recording.closed and not torch.compiler.is_compiling():
            recording.step["wrapped_forwards"] += 1
            recording.step["synced"] = bool(self.require_backward_grad_sync)
        return original(self, *args, **kwargs)

    return forward


def _wrap_wrapping(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        line = users_line()
        original(self, *args, **kwargs)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        WRAPPED.append((weakref.ref(self), {id(p) for p in trained}, line))
        recording.note("wrap", line=line, broadcast_buffers=bool(self.will_sync_module_buffers()))

    return __init__


WRAPPED: list[tuple[weakref.ref[DistributedDataParallel], set[int], str]] = []


def _wrap_no_sync(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def no_sync(self: DistributedDataParallel) -> Any:
        recording.step["no_sync_line"] = users_line()
        return original(self)

    return no_sync


def _turned_off(recording: Recording) -> bool:
    recording.step["drops"] = True
    return not recording.options.keep_random and not recording.uses_run


def _wrap_dropout(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    """Functions of (input, p, training, ...), with defaults that differ."""
    signature = inspect.signature(original)

    def dropout(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["training"] and bound.arguments["p"] > 0 and _turned_off(recording):
            bound.arguments["training"] = False
        return original(*bound.args, **bound.kwargs)

    return dropout


def _wrap_plain_dropout(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(input: Any, p: float, train: bool) -> Any:
        if train and p > 0 and not torch.compiler.is_compiling() and _turned_off(recording):
            train = False
        return original(input, p, train)

    return dropout


def _wrap_attention(recording: Recording, original: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:  # attn_mask, dropout_p, is_causal
            kwargs["dropout_p"], args = args[1], (args[0], *args[2:])
            if len(args) > 1:
                kwargs["is_causal"], args = args[1], args[:1]
        if kwargs.get("dropout_p", 0.0) > 0 and not torch.compiler.is_compiling() and _turned_off(recording):
            kwargs["dropout_p"] = 0.0
        return original(query, key, value, *args, **kwargs)

    return scaled_dot_product_attention

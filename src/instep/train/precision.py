"""Mixed precision: autocast inside prepared models only, and one loss scale for all ranks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from instep.errors import UsageError

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_precision(name: str) -> torch.dtype | None:
    """The autocast dtype, None for fp32. Raises UsageError."""
    if not isinstance(name, str) or name not in DTYPES:
        raise UsageError(f"precision={name!r} is not known. Allowed: {', '.join(map(repr, DTYPES))}.")
    return DTYPES[name]


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> list[Any]:
    """Runs the model's forward under autocast and gives its outputs in fp32. Returns the hooks, to be removed.

    By hooks rather than a wrapper, so that the object, its copies and its state_dict stay as they were. The hook that
    leaves autocast runs after an exception too.
    """
    contexts: list[torch.autocast] = []  # a stack, since forward may call itself

    def enter(module: nn.Module, args: Any) -> None:
        context = torch.autocast(device_type, dtype)
        context.__enter__()
        contexts.append(context)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if contexts:
            contexts.pop().__exit__(None, None, None)
        return as_float32(output)

    return [
        model.register_forward_pre_hook(enter, prepend=True),
        model.register_forward_hook(leave, always_call=True),
    ]


def as_float32(value: Any) -> Any:
    """The value with its 16-bit tensors in fp32: tensors, lists, tuples, mappings and data classes, nested."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Mapping):
        if all(as_float32(item) is item for item in value.values()):
            return value
        result: Any = copy.copy(value)
        for key, item in value.items():
            result[key] = as_float32(item)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(as_float32(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(as_float32(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, as_float32(getattr(value, field.name)))
        return result
    return value


class LossScale:
    """The fp16 loss scale: halved when a step's gradients are not finite, doubled after 2000 good steps.

    The constants are those of torch.amp.GradScaler. It is updated from reduced gradients, so all ranks decide alike.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 65536.0 if enabled else 1.0
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.value *= 0.5
        elif self._good_steps == self.GROWTH_INTERVAL:
            self.value *= 2.0
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self.enabled:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])

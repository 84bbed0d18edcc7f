"""Micro-batches on their way to the device; on CUDA the copy runs beside the computation."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(data: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with every tensor, and whatever else has a `.to`, replaced by `change` of it."""
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, str | bytes | int | float | type(None)):
        return data
    if isinstance(data, tuple):
        parts = [map_tensors(part, change) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if isinstance(data, list):
        return [map_tensors(part, change) for part in data]
    if hasattr(data, "to"):  # batches of other libraries; they are Mappings too and know better how to move
        return change(data)
    if isinstance(data, Mapping):
        return _map_mapping(data, change)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        moved = copy.copy(data)
        for field in dataclasses.fields(data):
            object.__setattr__(moved, field.name, map_tensors(getattr(data, field.name), change))
        return moved
    return data


def _map_mapping(data: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    parts = {key: map_tensors(value, change) for key, value in data.items()}
    if type(data) is dict:
        return parts
    try:  # a copy keeps what a dict subclass holds beside its items
        moved = copy.copy(data)
        moved.update(parts)  # type: ignore[attr-defined]
    except (TypeError, AttributeError):
        return parts
    return moved


class DeviceCopy:
    """Begins copies early and hands them out when they are needed.

    On CUDA they run in a stream of their own: in the stream of the computation a copy would wait for all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_host = device.type == "cpu"
        self.is_ahead = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_ahead else None

    def move(self, data: Any) -> Any:
        """The data on the device, for a device without streams of its own."""
        return data if self._is_host else map_tensors(data, lambda value: value.to(self.device))

    def begin(self, data: Any) -> tuple[Any, Any]:
        """What `finish` takes. What lies on the device already stays as it is."""
        if self._stream is None:
            return self.move(data), None
        with torch.cuda.stream(self._stream):
            moved = map_tensors(data, self._move)
            event = self._stream.record_event()
        return moved, event

    def finish(self, moved: Any, event: Any) -> Any:
        """The data, safe to use in the current stream."""
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            # Made in the copying stream, used in this one: its memory must not be given away before that use ends.
            map_tensors(moved, lambda value: _record_use(value, current))
        return moved

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device, non_blocking=True)
        return value.to(self.device)


def _record_use(value: Any, stream: Any) -> Any:
    tensors = value.values() if isinstance(value, Mapping) else (value,)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(stream)
    return value

"""Tensors inside batches and arguments, and a few bits of their content that tell two of them apart."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

_NOT_IN_NUMPY = tuple(
    getattr(torch, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)
)
_SAMPLED = 32  # elements of a tensor that its print is made of


def tensors_in(value: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place or "batch", value
    elif depth < 3 and isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{place}[{key!r}]", depth + 1)
    elif depth < 3 and isinstance(value, (list, tuple)):
        for index, item in enumerate(value[:8]):
            yield from tensors_in(item, f"{place}[{index}]", depth + 1)


def print_tensor(tensor: torch.Tensor) -> int:
    """A number that differs when the content does, made of a few elements spread over the tensor. About 4 us.

    0 for what cannot be told cheaply: nothing in it, or on a device.
    """
    if not tensor.is_cpu or not tensor.numel() or tensor.layout is not torch.strided or tensor.is_quantized:
        return 0
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype in _NOT_IN_NUMPY:
        tensor = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    elif tensor.is_complex():
        tensor = tensor.resolve_conj()
    values = tensor.numpy()
    flat = values.reshape(-1) if values.flags.c_contiguous else values[0].reshape(-1)
    return zlib.crc32(flat[:: max(1, flat.size // _SAMPLED)].tobytes()) or 1

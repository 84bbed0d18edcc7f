"""A tensor as a short vector that adds, scales and has the length of the tensor itself.

Small tensors are their own print. Of larger ones each element is added, with a random sign, to one of `BUCKETS` numbers
(a count sketch): prints of sums are sums of prints, and the norm of a print is that of the tensor within
sqrt(2 / BUCKETS), 4 %. Signs and places depend on the position alone, so that prints of any two runs can be compared.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy
import torch

BUCKETS = 1024
WHOLE = 4096  # elements up to which a tensor is its own print
WHOLE_VECTOR = 65536  # the same for tensors of one dimension, where rounding noise of single elements matters
_CHUNK = 1 << 20
_tables: dict[str, torch.Tensor] = {}


def print_tensor(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """The print, in float64. Of a sharded tensor the whole, so every rank of its mesh has to come."""
    flat = flatten(tensor)
    if flat.numel() <= (WHOLE_VECTOR if tensor.dim() < 2 else WHOLE):
        return flat.to("cpu").to(torch.float64).numpy().copy()  # some devices have no float64
    total = torch.zeros(BUCKETS, dtype=torch.float64)
    places, signs = _table()
    for number, start in enumerate(range(0, flat.numel(), _CHUNK)):
        part = flat[start : start + _CHUNK].to("cpu").to(torch.float64)
        sums = torch.zeros(BUCKETS, dtype=torch.float64)
        sums.index_add_(0, places[: part.numel()], part * signs[: part.numel()])
        total += sums.roll(number * 389)
    return total.numpy()


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()  # type: ignore[operator]  # a DTensor
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1)


def digest(tensor: torch.Tensor) -> str:
    """Equal for tensors whose elements have the same bits."""
    flat = flatten(tensor).to("cpu").contiguous()
    return hash_bytes(flat.view(torch.uint8).numpy())


def hash_bytes(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _table() -> tuple[torch.Tensor, torch.Tensor]:
    if not _tables:
        generator = torch.Generator().manual_seed(20240229)
        _tables["places"] = torch.randint(0, BUCKETS, (_CHUNK,), generator=generator)
        _tables["signs"] = torch.randint(0, 2, (_CHUNK,), generator=generator).double() * 2 - 1
    return _tables["places"], _tables["signs"]

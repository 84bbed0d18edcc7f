"""FullyShardedDataParallel, the older one: each rank's parameters are pieces of the whole, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from instep.verify.record.patch import replace

_owners: dict[int, weakref.ref[Any]] = {}  # by the id of a parameter
_all_gather = dist.all_gather  # before anything wraps it


def record_pieces() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    replace((FullyShardedDataParallel,), "__init__", _wrap_making)


def _wrap_making(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for parameter in self.parameters():
            _owners.setdefault(id(parameter), weakref.ref(self))

    return __init__


def is_piece(parameter: torch.Tensor) -> bool:
    owner = _owners.get(id(parameter))
    return owner is not None and owner() is not None


def gather_whole(parameter: torch.Tensor, own: torch.Tensor | None) -> torch.Tensor:
    """The whole of what `own` is this rank's piece of (the parameter or its gradient), flat; None counts as zeros.

    Every rank of the parameter's group must call it.
    """
    flat = torch.zeros(parameter.numel(), device=parameter.device) if own is None else own.detach().reshape(-1)
    owner = _owners[id(parameter)]()
    strategy = getattr(getattr(owner, "sharding_strategy", None), "name", "")
    group = getattr(owner, "process_group", None)
    if strategy in ("NO_SHARD", "") or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return flat
    sizes = [torch.zeros(1, dtype=torch.int64, device=flat.device) for _ in range(dist.get_world_size(group))]
    _all_gather(sizes, torch.tensor([flat.numel()], device=flat.device), group=group)
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=flat.dtype, device=flat.device) for _ in sizes]
    _all_gather(parts, torch.nn.functional.pad(flat, (0, longest - flat.numel())), group=group)
    whole = torch.cat([part[: int(size)] for part, size in zip(parts, sizes)])
    return whole[: _unpadded(parameter, whole.numel())]


def _unpadded(parameter: torch.Tensor, otherwise: int) -> int:
    """Elements of a flat parameter without the padding that makes its pieces equal; private, so all when unknown."""
    size = getattr(parameter, "_unpadded_unsharded_size", None)
    return size.numel() if isinstance(size, torch.Size) else otherwise

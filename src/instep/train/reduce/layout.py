"""Which gradient lies in which bucket: decided once from the order in which the gradients came, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BUCKET_BYTES = 4 << 20  # 1 to 5 MB overlap best on a 1 Gbit link and cost nothing elsewhere
LAST_BUCKET_BYTES = 1 << 20  # nothing is left to hide the last bucket behind, so it is small


@dataclass(frozen=True)
class Layout:
    """members[b]: parameter indices of bucket b, in the order they lie in it. Bucket b holds one dtype on one device."""

    members: tuple[tuple[int, ...], ...]


def plan_buckets(order: Sequence[int], tensors: Sequence[torch.Tensor], kinds: Sequence[object]) -> Layout:
    """order: all parameter indices, earliest gradient first. Buckets fill in that order, so they leave in index order.

    kinds: what, beside dtype and device, has to be the same in a bucket.
    """
    members: list[tuple[int, ...]] = []
    keys = [(tensor.dtype, tensor.device, kind) for tensor, kind in zip(tensors, kinds)]
    for key in dict.fromkeys(keys[i] for i in order):
        members += _cut([i for i in order if keys[i] == key], tensors)
    return Layout(tuple(members))


def _cut(order: list[int], tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """From the back: a small last bucket, then full ones."""
    buckets: list[list[int]] = [[]]
    room = LAST_BUCKET_BYTES
    for i in reversed(order):
        size = tensors[i].numel() * tensors[i].element_size()
        if buckets[-1] and size > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(i)
        room -= size
    return [tuple(reversed(bucket)) for bucket in reversed(buckets)]


def window(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A view of `flat` from `offset` with the parameter's shape and, where it is dense, its strides."""
    size, stride = parameter.size(), parameter.stride()
    if not _is_dense(parameter):
        stride = torch.empty(size, device="meta").stride()
    return flat.as_strided(size, stride, flat.storage_offset() + offset)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True when the tensor's elements fill its memory without gap or overlap, in whatever order of dims."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride()) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True

"""A bucket: one flat tensor that holds the gradients of some parameters and is summed over ranks at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass
class Bucket:
    """flat: the gradients one after another, then `tail` elements of control words (only in the last bucket).

    views: `param.grad` of each parameter, a window on `flat` with the parameter's own shape and strides.
    """

    index: int
    flat: torch.Tensor
    views: list[torch.Tensor] = field(default_factory=list)
    tail: int = 0

    @property
    def gradients(self) -> torch.Tensor:
        """The part of `flat` that may be compressed or reordered; the tail has to be summed as it is."""
        return self.flat[: self.flat.numel() - self.tail]

    @property
    def words(self) -> torch.Tensor:
        return self.flat[self.flat.numel() - self.tail :]


def plain_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`allocate` of transports that take any memory."""
    return torch.zeros(numel, dtype=dtype, device=device)


def forget_nothing(factor: float) -> None:
    """`rescale` of transports that keep nothing from step to step."""


class Handle(Protocol):
    def wait(self) -> object: ...


class Transport(Protocol):
    """Sums buckets over all ranks. Buckets are started in the same order on every rank."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros for a bucket that will be summed often. Every rank must call it, in the same order."""
        ...

    def start(self, bucket: Bucket) -> Handle:
        """Begins to replace `bucket.flat` by its sum over ranks; the same bits on every rank. Returns at once."""
        ...

    def rescale(self, factor: float) -> None:
        """Told when gradients come in another unit from now on, as when the loss scale of fp16 changes."""
        ...

    def close(self) -> None:
        """Gives up what the transport holds, without waiting for other ranks."""
        ...

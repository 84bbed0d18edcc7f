"""Parameters and buffers that other ranks hold."""

from __future__ import annotations

import torch
from torch import nn


class Absent(nn.Parameter):
    """Stands in a model for a tensor of another rank: shape, type and whether it is trained, but no numbers."""

    @staticmethod
    def of(tensor: torch.Tensor) -> Absent:
        return Absent(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)


def is_absent(tensor: object) -> bool:
    return isinstance(tensor, Absent)

"""The norm of all gradients together."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over all of them; not finite when any element is not (or when the norm is beyond fp32)."""
    squares = 0.0
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.element_size() < 4 else None)
        squares += float(norm) ** 2
    return math.sqrt(squares) if math.isfinite(squares) else squares

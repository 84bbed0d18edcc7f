"""The norm of all gradients together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from instep.train.mesh import Grid

LONG, ROW = 1 << 16, 4096


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over all of them; not finite when any element is not (or when the norm is beyond fp32)."""
    norms = [_norm(gradient) for gradient in gradients]
    squares = sum((norm**2 for norm in _read(norms)), 0.0)
    return math.sqrt(squares) if math.isfinite(squares) else squares


def _norm(gradient: Tensor) -> Tensor:
    """Of one tensor. On the CPU, torch's sum over many fp32 numbers comes out too small (by 1e-5 of a million, 1e-3 of 25
    million), so long ones are taken in rows, which costs nothing."""
    dtype = torch.float32 if gradient.element_size() < 4 else None
    is_long = gradient.is_cpu and gradient.dtype == torch.float32 and gradient.numel() >= LONG
    if not is_long or type(gradient) is not Tensor or not gradient.is_contiguous():
        return torch.linalg.vector_norm(gradient, dtype=dtype)
    flat, whole = gradient.view(-1), gradient.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:]).reshape(1)
    return torch.linalg.vector_norm(torch.cat([rows, rest]), dtype=torch.float64)


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """Waits once per device, not for each number."""
    found: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        found.setdefault(number.device, []).append(number.double())
    return [value for some in found.values() for value in torch.stack(some).tolist()]


def norm_over_peers(cut: Iterable[Tensor], alike: Iterable[Tensor], grid: Grid, copies: int = 1) -> float:
    """The norm where ranks hold different parts of the gradients. Every rank must call it.

    cut: of parameters of which each peer has another part; alike: of those that all ranks on the tensor axis hold, which
    the first of them counts. copies: how many data ranks hold the same part; 0 when each holds all of it.
    """
    squares = gradient_norm(cut) ** 2 + (gradient_norm(alike) ** 2 if grid.tensor_rank == 0 else 0.0)
    if copies:
        squares = grid.sum_over_data(squares / copies, "the gradient norm")
    (total,) = grid.sum_over_peers([squares], "the gradient norm")
    return math.sqrt(total) if math.isfinite(total) else total

"""Arithmetic on the prints of parameters and gradients: distances, a common factor, weights of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

Vectors = Mapping[str, Any]  # name -> numpy.ndarray of float64
FLOOR = 0.1  # of the model's typical gradient: one that is smaller, as its terms cancel, is compared with that


@dataclass(frozen=True)
class Distance:
    """The parameter that is farthest off, relative to its size."""

    name: str
    relative: float


def norm(vector: Any) -> float:
    return float(numpy.linalg.norm(vector))


def scales(vectors: Vectors) -> dict[str, float]:
    """The size that a difference of each vector is compared with. Where the sum over the batch is nothing but rounding,
    as of a bias before batch norm, that is the size that other gradients of the model have."""
    total = sum(norm(v) ** 2 for v in vectors.values())
    count = sum(max(1, v.size) for v in vectors.values())
    typical = math.sqrt(total / count) if count else 0.0
    return {name: max(norm(v), FLOOR * typical * math.sqrt(max(1, v.size))) for name, v in vectors.items()}


def farthest(one: Vectors, other: Vectors, sizes: Mapping[str, float]) -> Distance:
    """Over the names that both have."""
    best = Distance("", 0.0)
    for name in one:
        if name in other and one[name].shape == other[name].shape:
            gap = norm(one[name] - other[name])
            size = sizes.get(name, 0.0)
            relative = gap / size if size else (math.inf if gap else 0.0)
            if not relative <= best.relative:  # NaN counts as far
                best = Distance(name, relative if not math.isnan(relative) else math.inf)
    return best


def mean(parts: Sequence[Vectors]) -> dict[str, Any]:
    """The mean over ranks; a rank without a gradient counts as zero, as in an all-reduce."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part[name] for part in parts if name in part) / len(parts) for name in names}


def joined(vectors: Vectors, names: Sequence[str]) -> Any:
    return numpy.concatenate([vectors[name].reshape(-1) for name in names]) if names else numpy.zeros(0)


@dataclass(frozen=True)
class Fit:
    """other = factor * one, with a relative rest."""

    factor: float
    rest: float


def fit_factor(one: Vectors, other: Vectors) -> Fit | None:
    """The one factor between two sets of gradients; None where there is nothing to compare."""
    names = [name for name in one if name in other and one[name].shape == other[name].shape]
    a, b = joined(one, names), joined(other, names)
    square = float(a @ a)
    if not square or not norm(b) or not numpy.isfinite(a).all() or not numpy.isfinite(b).all():
        return None
    factor = float(a @ b) / square
    return Fit(factor, norm(b - factor * a) / norm(b))


def fit_weights(parts: Sequence[Vectors], whole: Vectors) -> tuple[list[float], float] | None:
    """Weights of the ranks' gradients that add up to the whole, and the relative rest; None when they say nothing."""
    names = [name for name in whole if all(name in part for part in parts)]
    matrix = numpy.stack([joined(part, names) for part in parts], axis=1) if names else numpy.zeros((0, len(parts)))
    target = joined(whole, names)
    if matrix.shape[0] < 2 * len(parts) or not numpy.isfinite(matrix).all() or not norm(target):
        return None
    weights, _, rank, _ = numpy.linalg.lstsq(matrix, target, rcond=1e-10)
    if rank < len(parts):
        return None
    return [float(w) for w in weights], norm(matrix @ weights - target) / norm(target)

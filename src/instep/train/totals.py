"""Means and sums over ranks of what an evaluation found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from instep.errors import UsageError


def local_terms(value: Any, weight: Any) -> list[tuple[Any, float]]:
    """Pairs of value and weight, from one of each or one per batch. Tensors are moved to the host."""
    if isinstance(value, (list, tuple)):
        weights = list(weight) if isinstance(weight, (list, tuple)) else [weight] * len(value)
        if len(weights) != len(value):
            raise UsageError(
                f"run.mean got {len(value)} values and {len(weights)} weights; it takes one weight per value."
            )
        return [(_host(v), _number(w)) for v, w in zip(value, weights)]
    return [(_host(value), _number(weight))]


def mean_of(terms: Sequence[tuple[Any, float]]) -> Any:
    """The weighted mean, in double precision and in the order given. NaN when nothing has a weight."""
    total_weight = sum(weight for _, weight in terms)
    total = sum_of([_scaled(value, weight) for value, weight in terms if weight])
    return total / total_weight if total_weight else float("nan")


def sum_of(values: Sequence[Any]) -> Any:
    total: Any = 0
    for value in values:
        total = total + value
    return total


def _scaled(value: Any, weight: float) -> Any:
    return value.double() * weight if isinstance(value, torch.Tensor) else value * weight


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.item() if value.dim() == 0 else value
    return value


def _number(weight: Any) -> float:
    number = weight.item() if isinstance(weight, torch.Tensor) else weight
    if not isinstance(number, (int, float)) or not number >= 0:
        raise UsageError(f"run.mean(weight={weight!r}): the weight is the number of items that the value is a mean of.")
    return number

"""Means and sums over ranks of what an evaluation found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from instep.errors import RanksDisagree, UsageError
from instep.train.call_arguments import plain_number, read_weight, show


def local_terms(call: str, value: Any, weight: Any) -> list[tuple[Any, float]]:
    """Pairs of value and weight, from one of each or one per batch. Tensors are moved to the host."""
    if isinstance(value, (list, tuple)):
        weights = list(weight) if isinstance(weight, (list, tuple)) else [weight] * len(value)
        if len(weights) != len(value):
            raise UsageError(
                f"{call} got {len(value)} values and {len(weights)} weights; it takes one weight per value."
            )
        return [(_host(call, v), read_weight(call, w, "value")) for v, w in zip(value, weights)]
    return [(_host(call, value), read_weight(call, weight, "value"))]


def mean_of(terms: Sequence[tuple[Any, float]]) -> Any:
    """The weighted mean, in double precision and in the order given. NaN when nothing has a weight."""
    total_weight = sum(weight for _, weight in terms)
    total = sum_of("run.mean", [_scaled(value, weight) for value, weight in terms if weight])
    return total / total_weight if total_weight else float("nan")


def sum_of(call: str, values: Sequence[Any]) -> Any:
    """Raises RanksDisagree, on every rank alike, for values that cannot be added to each other."""
    total: Any = 0
    for value in values:
        try:
            total = total + value
        except (RuntimeError, ValueError):  # of torch and of numpy, for shapes
            shapes = " and ".join(str(tuple(getattr(each, "shape", ()))) for each in (total, value))
            raise RanksDisagree(
                f"{call} cannot add values of the shapes {shapes}: give it one shape on all ranks and in all batches, or "
                "collect them with run.gather."
            ) from None
    return total


def _scaled(value: Any, weight: float) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.to(torch.complex128) if value.is_complex() else value.double()) * weight
    return value * weight


def _host(call: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_meta and value.layout == torch.strided:
        value = value.detach().cpu()
        return value.item() if value.dim() == 0 else value
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # of numpy's arrays and numbers
    if (
        plain_number(value) is not None
        or isinstance(value, complex)
        or (isinstance(kind, str) and kind and kind in "biufc")
    ):
        return value
    hint = " Give its values one by one." if isinstance(value, dict) else ""
    raise UsageError(
        f"{call} got {show(value)}; it takes a number or a tensor, or a list of them, one per batch.{hint}"
    )

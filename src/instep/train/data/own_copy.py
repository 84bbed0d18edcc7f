"""A copy of an iterable dataset for each virtual stream, as each worker process would have its own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch.utils.data import IterableDataset

_MOST_PARTS = 1000  # a longer list is data, not a list of sources


def own_copy(dataset: Any, copies: dict[int, Any] | None = None) -> Any:
    """A dataset whose position is its own, while its data (tensors, lists, maps) stay shared.

    Many datasets keep the position in themselves or in an iterable they wrap, so these objects are copied; a deep copy
    would read whole files into memory. What cannot be copied (an open generator) stays shared.
    """
    copies = {} if copies is None else copies
    if id(dataset) in copies:
        return copies[id(dataset)]
    try:
        clone = copy.copy(dataset)
    except (TypeError, AttributeError, NotImplementedError, copy.Error, pickle.PicklingError):
        return dataset
    copies[id(dataset)] = clone
    for name, value in list(getattr(clone, "__dict__", {}).items()):
        replaced = _own_part(value, copies)
        if replaced is not value:
            clone.__dict__[name] = replaced
    return clone


def _own_part(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, list | tuple) and type(value) in (list, tuple) and 0 < len(value) <= _MOST_PARTS:
        return type(value)(own_copy(part, copies) for part in value) if all(map(_has_position, value)) else value
    if type(value) is dict and 0 < len(value) <= _MOST_PARTS and all(map(_has_position, value.values())):
        return {key: own_copy(part, copies) for key, part in value.items()}
    return own_copy(value, copies) if _has_position(value) else value


def _has_position(value: Any) -> bool:
    """Whether it is read from front to back: an iterable that is no container (an array on disk above all)."""
    if isinstance(value, IterableDataset):
        return True
    if isinstance(value, torch.nn.Module | type) or not hasattr(value, "__dict__"):
        return False
    return hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__")

"""Which samples of a data set a pass takes, and whether two ranks' data sets are the same: in a few numbers each."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler, Subset, SubsetRandomSampler

from instep.launch.probe.tensor_prints import print_tensor

_KEPT = 256  # about so many of a data set's samples are followed
_MIXER, _MASK = 2654435761, (1 << 32) - 1  # spreads neighbouring numbers (Knuth, multiplicative hashing)
_MOST_MEMBERS = 40
_MOST_LISTED = 20_000
_MOST_PASSES = 3


class Seen:
    """The followed samples of one pass, by their number in the data set at the bottom."""

    def __init__(self, dataset: Any, passes: int, length: int | None) -> None:
        self.maps, base = _maps_of(dataset)
        self.base_length = length_of(base)
        total = self.base_length or length or 0
        self.limit = _MASK + 1 if total <= _KEPT else _KEPT * (_MASK + 1) // total
        self.numbers: list[int] = []
        self.is_on = passes <= _MOST_PASSES and total > 0

    def add(self, drawn: list[int]) -> None:
        if not self.is_on or not drawn:
            return
        for mapped in self.maps:
            drawn = [mapped[index] for index in drawn]
        limit = self.limit
        self.numbers += [index for index in drawn if (index * _MIXER & _MASK) < limit]

    def as_list(self) -> list[int]:
        return sorted(map(int, self.numbers))[: 4 * _KEPT] if self.is_on else []


def length_of(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _maps_of(dataset: Any) -> tuple[list[Any], Any]:
    """From positions in nested subsets to those in the data set at the bottom."""
    maps: list[Any] = []
    while isinstance(dataset, Subset):
        maps.append(dataset.indices)
        dataset = dataset.dataset
    return maps, dataset


def print_data_set(dataset: Any) -> int | None:
    """A number made of the members of a data set (or of the one under a subset); equal ones make it likely that it holds
    the same samples. None when nothing about it can be told."""
    _, base = _maps_of(dataset)
    members = getattr(base, "__dict__", None)
    if not members:
        return None
    rows = [(name, _print_member(value)) for name, value in sorted(members.items())[:_MOST_MEMBERS]]
    known = [row for row in rows if row[1] is not None]
    return zlib.crc32(repr((type(base).__name__, length_of(base), known)).encode()) if known else None


def _print_member(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), print_tensor(value)
    if isinstance(value, (str, int, float, bytes, bool, Path)) or value is None:
        return zlib.crc32(repr(value).encode())
    if hasattr(value, "__array_interface__") and getattr(value, "size", 0):
        flat = value.reshape(-1)
        return tuple(value.shape), zlib.crc32(repr(flat[:: max(1, flat.size // 32)].tolist()).encode())
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_LISTED:
        if value and all(isinstance(one, torch.Tensor) for one in value[:8]):
            return len(value), tuple(print_tensor(one) for one in value[:8])
        plain = bool(value) and isinstance(value[0], (str, int, float, tuple, list, dict, Path))
        return (len(value), zlib.crc32(repr(value[:: max(1, len(value) // 64)]).encode())) if plain else None
    return None


def can_shuffle(sampler: Any, batch_sampler: Any, dataset: Any) -> dict[str, bool]:
    """random: torch's own sampler draws an order; by_epoch: something here is to be told the epoch."""
    owners = (sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    return {
        "random": isinstance(sampler, (RandomSampler, SubsetRandomSampler)),
        "replaces": bool(getattr(sampler, "replacement", False)),
        "by_epoch": any(hasattr(owner, "set_epoch") for owner in owners),
    }


def print_subset(dataset: Any) -> int | None:
    """Which part of a data set a Subset takes; None for anything else."""
    if not isinstance(dataset, Subset):
        return None
    indices = dataset.indices
    return zlib.crc32(repr([int(index) for index in indices[:2000]]).encode()) ^ len(indices)


def print_order(dataset: Any) -> list[int] | None:
    """For a data set of the script's own that keeps a list of its samples (paths, rows): a print of their order, one
    that does not depend on the order, and whether each entry is another one, as paths and numbers of samples are. None where there is no such list, or it is too long to look at."""
    length = length_of(dataset) or 0
    members = getattr(dataset, "__dict__", {})
    for value in members.values() if length else ():
        if hasattr(value, "tolist") and length <= _MOST_LISTED and _is_list_of_numbers(value):
            value = value.tolist()
        if isinstance(value, (list, tuple)) and len(value) == length <= _MOST_LISTED and _is_plain(value[0]):
            rows = [zlib.crc32(repr(item).encode()) for item in value]
            names_samples = len(set(rows)) == length and not isinstance(value[0], float)
            return [zlib.crc32(repr(rows).encode()), sum(rows) & 0xFFFFFFFF, int(names_samples)]
    return None


def _is_list_of_numbers(value: Any) -> bool:
    """Whether an array or tensor has one whole number for each sample, as an order or a choice of samples has."""
    return "int" in str(getattr(value, "dtype", "")) and len(getattr(value, "shape", ())) == 1


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bytes, tuple, Path))

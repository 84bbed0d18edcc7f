"""What all ranks have to come with alike, compared before any of them waits for another in training."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import Subset, TensorDataset

from instep.errors import RanksDisagree
from instep.train.world import World

RATES = ("lr", "weight_decay", "momentum")  # of a parameter group: what scripts change while they train
FIRST_BYTES = 1 << 12  # of a tensor that stand for all of it


def agree(mine: Mapping[str, Any], world: World, call: str, what: str) -> None:
    """Raises RanksDisagree on every rank, naming the first value that differs and its ranks. Every rank must call it.

    mine: by name, values that can be printed; what: what they are, for the error.
    """
    if world.size == 1:
        return
    first, *others = world.gather_objects(dict(mine), call)
    for rank, theirs in enumerate(others, start=1):
        for name in (*first, *theirs):
            here, there = first.get(name), theirs.get(name)
            if repr(here) != repr(there):  # NaN is equal to itself here
                raise RanksDisagree(
                    f"The ranks came to {call} with different {what}: {name}={here!r} on rank 0, {name}={there!r} on rank {rank}. "
                    "Give all of them the same."
                )


def describe_groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options of all parameter groups by name."""
    groups = optimizer.param_groups
    found: dict[str, Any] = {"groups": len(groups)}
    for number, group in enumerate(groups):
        prefix = f"group {number}'s " if len(groups) > 1 else ""
        found |= {prefix + name: value for name, value in plain_items(group).items()}
    return found


def describe_parts(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """An optimizer and its scheduler, where there are any."""
    found: dict[str, Any] = {"optimizer": _name(optimizer), "scheduler": _name(scheduler)}
    if isinstance(optimizer, torch.optim.Optimizer):
        found |= describe_groups(optimizer)
    settings = vars_of(scheduler) if type(scheduler).__module__.startswith("torch.optim.") else {}
    return found | {f"scheduler.{name}": value for name, value in plain_items(settings).items()}


def digest_rates(optimizer: torch.optim.Optimizer) -> int:
    """24 bits that tell learning rates and their like apart; microseconds, for every step."""
    values = [group.get(name) for group in optimizer.param_groups for name in RATES]
    return hash(tuple(value for value in values if isinstance(value, (int, float)))) & 0xFFFFFF


def describe_data(dataset: Any) -> dict[str, Any]:
    """What can be said of a dataset without reading samples: its kind, its length, which part of another one it is."""
    found: dict[str, Any] = {"dataset": _name(dataset)}
    if isinstance(dataset, Subset):
        indices = zlib.crc32(numpy.asarray(list(dataset.indices)).tobytes())
        return found | {"samples": len(dataset.indices), "which samples (as a checksum)": indices}
    if isinstance(dataset, TensorDataset):
        starts = [tensor.flatten()[: FIRST_BYTES // tensor.element_size()] for tensor in dataset.tensors]
        content = zlib.crc32(repr([start.tolist() for start in starts]).encode())
        return found | {"samples": len(dataset), "the first samples (as a checksum)": content}
    return found


def plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are numbers, texts, or tuples and lists of such."""
    return {name: value for name, value in values.items() if name != "params" and _is_plain(value)}


def vars_of(scheduler: Any) -> dict[str, Any]:
    """The scheduler's own settings; what begins with an underscore is its business."""
    return {name: value for name, value in getattr(scheduler, "__dict__", {}).items() if not name.startswith("_")}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _name(value: Any) -> str | None:
    return None if value is None else type(value).__name__

"""What differs between two checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from instep.errors import CheckpointError
from instep.train.checkpoint.manifest import Damage, find_damage, read_manifest
from instep.train.checkpoint.saved import Saved


@dataclass
class Comparison:
    """only_first, only_second: names of tensors; other: of another shape or type; differ: the largest absolute
    difference; values: what is not a tensor, first and second."""

    num_equal: int = 0
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    other: dict[str, str] = field(default_factory=dict)
    differ: dict[str, float] = field(default_factory=dict)
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def summary(self) -> str:
        parts = [f"{self.num_equal} tensors are bit-identical", f"{len(self.differ)} differ"]
        lone = len(self.only_first) + len(self.only_second)
        parts += [f"{lone} are in one only"] if lone else []
        parts += [f"{len(self.other)} have another shape or type"] if self.other else []
        return ", ".join([*parts, f"{len(self.values)} other values differ"])

    def lines(self) -> list[str]:
        """The largest difference first."""
        differing = sorted(self.differ.items(), key=lambda item: -item[1])
        return [
            *(f"  only in the first   {name}" for name in self.only_first),
            *(f"  only in the second  {name}" for name in self.only_second),
            *(f"  {text}" for text in self.other.values()),
            *(f"  {largest:10.3g} at most  {name}" for name, largest in differing),
            *(f"  {name}: {first!r} and {second!r}" for name, (first, second) in self.values.items()),
        ]


def compare_checkpoints(first: Path, second: Path) -> Comparison:
    """Bit by bit. Raises CheckpointError when one of them is damaged."""
    a, b = open_saved(first), open_saved(second)
    found = Comparison(
        only_first=sorted(set(a.described) - set(b.described)), only_second=sorted(set(b.described) - set(a.described))
    )
    for name in sorted(set(a.described) & set(b.described)):
        if a.described[name] != b.described[name]:
            one, two = (f"{tuple(s.described[name].shape)} {s.described[name].dtype}" for s in (a, b))
            found.other[name] = f"{name}: {one} and {two}"
            continue
        (left,), (right,) = a.load([name]).values(), b.load([name]).values()
        if _same_bits(left, right):
            found.num_equal += 1
        else:
            found.differ[name] = _largest_difference(left, right)
    _compare_values("", a.values, b.values, found.values)
    return found


def open_saved(path: Path) -> Saved:
    """One checkpoint, verified. Raises CheckpointError."""
    try:
        manifest = read_manifest(path)
        problems = find_damage(path, manifest)
    except Damage as damage:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {damage}.") from None
    if problems:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {'; '.join(problems)}.")
    return Saved(path, manifest)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def _largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    wide = torch.complex128 if left.is_complex() else torch.float64
    return float((left.to(wide) - right.to(wide)).abs().max())


def _compare_values(path: str, first: Any, second: Any, found: dict[str, tuple[Any, Any]]) -> None:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            _compare_values(f"{path}/{key}".lstrip("/"), first.get(key), second.get(key), found)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, (one, two) in enumerate(zip(first, second)):
            _compare_values(f"{path}/{index}", one, two, found)
    elif json.dumps(first) != json.dumps(second):
        found[path] = (first, second)

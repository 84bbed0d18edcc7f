"""Where saved tensors come from, and how what was saved is compared with what is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from instep.errors import CheckpointError
from instep.train.checkpoint.pieces import local_pieces


@dataclass(frozen=True)
class Described:
    """A saved tensor: whole shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """Saved tensors by name, read only when asked for."""

    @property
    def described(self) -> Mapping[str, Described]: ...

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fills existing tensors, of which a DTensor takes only this rank's part."""
        ...


class InMemory:
    """Whole tensors that are already in memory, as a Source."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.described: Mapping[str, Described] = {
            name: Described(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                for piece in local_pieces(target):
                    piece.local.copy_(self.tensors[name][piece.slices])


@dataclass
class Differences:
    """What does not fit between what was saved and what is here, to be said all at once."""

    of: str
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def compare(self, name: str, saved: Described, here: torch.Tensor, *, with_type: bool = True) -> None:
        if saved.shape != tuple(here.shape):
            self.other.append(f"{name} is {_shape(saved.shape)} there and {_shape(here.shape)} here")
        elif with_type and saved.dtype != here.dtype:
            self.other.append(f"{name} is {_type(saved.dtype)} there and {_type(here.dtype)} here")

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.other)

    def __str__(self) -> str:
        parts = []
        if self.missing:
            parts.append(f"missing there: {some(self.missing)}")
        if self.unexpected:
            parts.append(f"not known here: {some(self.unexpected)}")
        if self.other:
            parts.append(f"of another shape or type: {some(self.other)}")
        return f"{self.of}: {'; '.join(parts)}"


def refuse(title: str, differences: Sequence[Differences], advice: str) -> None:
    """Raises CheckpointError that lists them, if there are any."""
    found = [str(each) for each in differences if each]
    if found:
        raise CheckpointError(f"{title}. " + ". ".join(found) + f". {advice}")


def some(names: Sequence[str], most: int = 8) -> str:
    """`3 (a, b, c)`, shortened where there are many."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} ({', '.join(names[:most])}{more})"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "a scalar"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

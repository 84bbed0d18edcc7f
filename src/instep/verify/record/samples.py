"""Which samples a step was made of: a hash for each, that does not depend on the batch it came in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from instep.verify.record.prints import hash_bytes

_MOST_BATCHES = 256  # fetched batches that are remembered


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, depth - 1)
    elif depth and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for each in value:
            yield from tensors_in(each, depth - 1)
    elif depth and is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name, None), depth - 1)


def row_bytes(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each row."""
    flat = tensor.detach().to("cpu").contiguous()
    if not flat.shape[0]:
        return []
    data = flat.view(torch.uint8).reshape(flat.shape[0], -1).numpy() if flat.dim() > 1 else None
    if data is None:
        data = flat.reshape(-1, 1).view(torch.uint8).numpy()
    return [row.tobytes() for row in data]


def split_rows(value: Any) -> tuple[list[str], list[str]]:
    """Hash of each whole sample of a batch, and of its largest part alone, by which a model's input is recognised."""
    tensors = [one for one in tensors_in(value) if one.dim() > 0 and one.layout is torch.strided]
    if not tensors:
        return [], []
    size = tensors[0].shape[0]
    rows = [row_bytes(one) for one in tensors if one.shape[0] == size]
    if not size:
        return [], []
    largest = max(rows, key=lambda part: len(part[0]))
    return [hash_bytes(b"|".join(parts)) for parts in zip(*rows)], [hash_bytes(part) for part in largest]


class Samples:
    """The samples of the step in progress."""

    def __init__(self) -> None:
        self._batches: OrderedDict[int, tuple[list[str], list[str], dict[str, str]]] = OrderedDict()
        self._fetches = 0
        self.fetched: list[str] = []  # since the last update, while gradients were on
        self.known: list[str] = []  # given to a model, and from a loader
        self.unknown: list[str] = []  # given to a model, from nowhere we know

    def fetch(self, batch: Any) -> None:
        """A loader handed out a batch."""
        samples, keys = split_rows(batch)
        self._fetches += 1
        self._batches[self._fetches] = keys, samples, dict(zip(keys, samples))
        if len(self._batches) > _MOST_BATCHES:
            self._batches.popitem(last=False)
        if torch.is_grad_enabled():
            self.fetched += samples

    def enter(self, inputs: Any) -> int:
        """A model got these inputs; returns how many rows."""
        given = [one for one in tensors_in(inputs) if one.dim() > 0 and one.grad_fn is None]
        if not given:
            return 0
        hashes = {id(one): [hash_bytes(row) for row in row_bytes(one)] for one in given[:8]}
        for own_keys, samples, sample_of in reversed(self._batches.values()):
            for keys in hashes.values():
                if keys and all(key in sample_of for key in keys):
                    # A batch may hold equal inputs with different targets; in its own order nothing is mixed up.
                    self.known += samples if own_keys == keys else [sample_of[key] for key in keys]
                    return len(keys)
        self.unknown += split_rows(given)[0]
        return given[0].shape[0]

    def take(self) -> tuple[str, list[str]]:
        """Where the samples of the step were seen, and their hashes; begins the next step."""
        if self.known:
            found = "loader", self.known
        elif self.fetched:
            found = "loader", self.fetched
        else:
            found = "inputs", self.unknown
        self.fetched, self.known, self.unknown = [], [], []
        return found

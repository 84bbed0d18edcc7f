"""Datasets of every kind, and what a run of any number of ranks gets from them, rank by rank in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from instep.train.data.loader import Loader, build_loader
from instep.train.slots import plan_slots

SIZE = 103  # no multiple of any batch below
CPU = torch.device("cpu")


class Augmented(Dataset):
    """Draws from every global generator for a sample."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float, float]:
        return index, torch.rand(2), random.random(), float(numpy.random.rand())


class AtOnce(Augmented):
    """Gives the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, torch.rand(2), random.random(), float(numpy.random.rand())) for index in indices]


class Split(IterableDataset):
    """Splits itself as torch's documentation shows, and draws for a sample."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.size, stride):
            yield index, torch.rand(2), random.random(), float(numpy.random.rand())


class Unsplit(IterableDataset):
    """Knows nothing of workers."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(SIZE):
            yield index, torch.rand(2), random.random(), float(numpy.random.rand())


class Uneven(IterableDataset):
    """Stream m of M has 5 m samples; the first is empty."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index in range(5 * info.id):
            yield 1000 * info.id + index, torch.rand(2)


class Files(IterableDataset):
    """Shuffles its files by a global generator, which in torch's workers loses some and doubles others."""

    def __iter__(self) -> Iterator[Any]:
        files = list(range(20))
        random.shuffle(files)
        info = get_worker_info()
        assert info is not None
        for file in files[info.id :: info.num_workers]:
            for line in range(5):
                yield 5 * file + line, random.random()


class Stateful(IterableDataset):
    """Keeps its position in a state_dict, and counts the samples it had to make."""

    def __init__(self, splits: bool = True) -> None:
        self.splits = splits
        self.position = 0
        self.made: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.splits else None
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.position * stride < SIZE:
            index = first + self.position * stride
            self.position += 1
            self.made.append(index)
            yield index, random.random()
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class OwnIterator:
    """Its own iterator, as many hand-written readers are; no torch class."""

    def __iter__(self) -> OwnIterator:
        self.next = 0
        return self

    def __next__(self) -> tuple[int, float]:
        if self.next == SIZE:
            raise StopIteration
        self.next += 1
        return self.next - 1, random.random()


class Wrapping(IterableDataset):
    """Reads another iterable, which holds the position."""

    def __init__(self) -> None:
        self.source = OwnIterator()

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index, drawn in self.source:
            if index % info.num_workers == info.id:
                yield index, drawn


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.arange(SIZE), torch.randn(SIZE, 3, generator=generator))


def loader_of(source: Any, rank: int = 0, world_size: int = 1, global_batch: int = 16, **options: Any) -> Loader:
    micro_batch = options.pop("micro_batch", 2)
    settings = {"seed": 3, "device": CPU, "local_size": world_size, "num_workers": 0, "say": lambda text: None}
    slots = plan_slots(global_batch, micro_batch, rank, world_size)
    return build_loader(source, slots=slots, **(settings | options))


def steps_of(
    make: Any,
    world_size: int = 1,
    epoch: int = 1,
    first_step: int = 0,
    most: int = 50,
    looks_ahead: bool = False,
    **options: Any,
) -> Any:
    """{(step, slot): (samples, data as lists)} of an epoch over all ranks. make: gives the source, anew for a rank.

    looks_ahead: asks whether there is a next step before this one is read.
    """
    found: dict[tuple[int, int], Any] = {}
    for rank in range(world_size):
        loader = loader_of(make(), rank, world_size, **options)
        current = loader.start_epoch(epoch, first_step)
        has_next = current.has_next()
        for step in range(first_step, first_step + most):
            if not has_next:
                break
            batches = current.next_step()
            if looks_ahead:
                has_next = current.has_next()
            for batch in batches:
                assert (step, batch.slot) not in found
                found[step, batch.slot] = (batch.num_samples, as_lists(batch.data))
            if not looks_ahead:
                has_next = current.has_next()
        current.close()
        loader.close()
    return dict(sorted(found.items()))


def as_lists(data: Any) -> list[Any]:
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in data]


def indices_of(steps: Any) -> list[int]:
    return [index for _, data in steps.values() for index in data[0]]

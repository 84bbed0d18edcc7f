"""An existing DataLoader: what was set there is kept, its sampler above all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from data_sources import SIZE, Augmented, indices_of, loader_of, steps_of, tensors
from instep import UsageError


class Drawing(Sampler):
    """Draws as it goes, from global generators and from its own, and never ends."""

    def __init__(self) -> None:
        self.own = random.Random(1)
        self.numpy_own = numpy.random.default_rng(1)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while True:
            draw = random.random() + float(torch.rand(())) + self.own.random() + self.numpy_own.random()
            yield int(draw / 4 * SIZE)


class Buckets(Sampler):
    """Gives batches of one or two, as samplers that sort by length do."""

    def __init__(self, most: int = 2) -> None:
        self.most = most

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[list[int]]:
        numbers = itertools.cycle(range(SIZE))
        for _ in range(30):
            yield [next(numbers) for _ in range(random.randint(1, self.most))]


LOADERS = {
    "weighted": lambda: DataLoader(tensors(), 2, sampler=WeightedRandomSampler([1.0] * 50 + [9.0] * 53, 90)),
    "weighted, own generator": lambda: DataLoader(
        tensors(), 2, sampler=WeightedRandomSampler([1.0] * SIZE, 90, generator=torch.Generator())
    ),
    "some": lambda: DataLoader(tensors(), 2, sampler=SubsetRandomSampler(range(40))),
    "replacement": lambda: DataLoader(tensors(), 2, sampler=RandomSampler(range(SIZE), True, 70)),
    "list": lambda: DataLoader(tensors(), 2, sampler=[5, 3, 3, 1, 0]),
    "infinite": lambda: DataLoader(tensors(), 2, sampler=Drawing()),
    "batches": lambda: DataLoader(tensors(), batch_sampler=Buckets()),
    "batches of a sampler": lambda: DataLoader(
        tensors(), batch_sampler=BatchSampler(SubsetRandomSampler(range(45)), 2, False)
    ),
    "ready batches": lambda: DataLoader(Ready(), batch_size=None),
    "ready stream": lambda: DataLoader(ReadyStream(), batch_size=None),
}


class Ready(Dataset):
    """An item is a whole batch."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        return numpy.array([2 * index, 2 * index + 1]), torch.rand(2)


class ReadyStream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, 37, info.num_workers):
            yield [torch.tensor([index]), torch.rand(1)]


@pytest.mark.parametrize("name", LOADERS)
def test_the_sampler_is_kept_for_every_number_of_ranks(name: str) -> None:
    one = steps_of(LOADERS[name], most=6)
    for world_size in (2, 3, 8):
        assert steps_of(LOADERS[name], world_size, most=6) == one
    rest = steps_of(LOADERS[name], 2, first_step=2, most=4)
    assert rest == {key: value for key, value in one.items() if key[0] >= 2}


@pytest.mark.parametrize(
    "name",
    ["weighted", "weighted, own generator", "some", "replacement", "infinite", "batches", "batches of a sampler"],
)
def test_samplers_that_draw_are_seeded_by_seed_and_epoch(name: str) -> None:
    one = indices_of(steps_of(LOADERS[name], most=4))
    random.seed(7)
    torch.manual_seed(7)
    assert indices_of(steps_of(LOADERS[name], most=4)) == one
    if name != "batches":  # its draws decide the sizes only
        assert indices_of(steps_of(LOADERS[name], epoch=2, most=4)) != one
        assert indices_of(steps_of(LOADERS[name], seed=4, most=4)) != one


def test_the_samples_of_a_sampler_are_what_it_gave() -> None:
    assert sorted(indices_of(steps_of(LOADERS["some"], 2))) == list(range(40))
    assert indices_of(steps_of(LOADERS["list"], 2)) == [5, 3, 3, 1, 0]
    assert indices_of(steps_of(LOADERS["ready batches"], 4)) == list(range(74))
    weighted = indices_of(steps_of(LOADERS["weighted"]))
    assert len(weighted) == 90
    assert sum(index >= 50 for index in weighted) > 65


def test_a_kept_order_is_taken_step_by_step() -> None:
    steps = steps_of(LOADERS["batches"], 2)
    assert sorted(steps) == [(step, slot) for step in range(4) for slot in range(8)][:30]
    assert {count for count, _ in steps.values()} == {1, 2}
    assert indices_of(steps) == list(range(len(indices_of(steps))))


@pytest.mark.parametrize(
    ("name", "length"), [("weighted", 6), ("some", 3), ("list", 1), ("batches", 4), ("ready batches", 5)]
)
def test_the_length_is_that_of_the_sampler_in_steps(name: str, length: int) -> None:
    loader = loader_of(LOADERS[name]())
    assert len(loader) == length
    assert loader.start_epoch(0).num_steps == length


def test_a_sampler_without_an_end_has_no_length() -> None:
    loader = loader_of(LOADERS["infinite"]())
    with pytest.raises(TypeError, match=r"its sampler has no length.*run\.steps\(loader, steps=\.\.\.\)"):
        len(loader)
    assert loader.start_epoch(0).num_steps is None


def test_a_sampler_is_told_the_epoch() -> None:
    sampler = Drawing()
    loader_of(DataLoader(tensors(), 2, sampler=sampler)).start_epoch(5)
    assert sampler.epoch == 5


@pytest.mark.parametrize("shuffle", [False, True])
def test_plain_orders_become_ours(shuffle: bool) -> None:
    from_loader = steps_of(lambda: DataLoader(Augmented(), 2, shuffle=shuffle, drop_last=True), 2)
    assert from_loader == steps_of(Augmented, 2, shuffle=shuffle, drop_last=True)


def test_a_distributed_sampler_is_replaced_and_that_is_said() -> None:
    said: list[str] = []
    sampler = DistributedSampler(Augmented(), num_replicas=2, rank=1, shuffle=True)
    loader = loader_of(DataLoader(Augmented(), 2, sampler=sampler), say=said.append)
    assert said == [
        "the DataLoader's DistributedSampler is replaced: instep gives each rank its part of every step itself"
    ]
    epoch = loader.start_epoch(1)
    first = [index for batch in epoch.next_step() for index in batch.data[0].tolist()]
    ours = steps_of(Augmented, shuffle=True)
    assert first == [index for (step, _), (_, data) in ours.items() if step == 0 for index in data[0]]


def test_its_collate_function_is_kept() -> None:
    loader = loader_of(DataLoader(tensors(), 2, collate_fn=lambda samples: ["joined", len(samples)]))
    assert [batch.data for batch in loader.start_epoch(0).next_step()] == [["joined", 2]] * 8


def test_a_batch_size_that_is_no_micro_batch_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        loader_of(DataLoader(tensors(), 4))
    assert str(error.value) == (
        "the DataLoader has batch_size=4, but micro_batch=2: one of its batches is one micro-batch. "
        "Give the DataLoader batch_size=2, or Run micro_batch=4."
    )
    with pytest.raises(UsageError, match="the DataLoader has batch_size=3, but micro_batch=2"):
        loader_of(DataLoader(tensors(), batch_sampler=BatchSampler(range(9), 3, False)))


def test_a_batch_of_a_sampler_that_is_too_large_is_refused() -> None:
    epoch = loader_of(DataLoader(tensors(), batch_sampler=Buckets(most=9))).start_epoch(0)
    with pytest.raises(UsageError, match=r"a batch of \d samples, but micro_batch=2: one of its batches is one micro"):
        epoch.next_step()


def test_a_sampler_of_one_rank_is_refused() -> None:
    class Own(DistributedSampler):
        pass

    with pytest.raises(UsageError) as error:
        loader_of(DataLoader(tensors(), 2, sampler=Own(tensors(), num_replicas=2, rank=0)))
    assert str(error.value) == (
        "the sampler Own gives each rank a part of its own (num_replicas=2), and instep would divide that part again. "
        "Give a sampler over the whole dataset (num_replicas=1, rank=0)."
    )
    loader_of(DataLoader(tensors(), 2, sampler=Own(tensors(), num_replicas=1, rank=0)))


def test_what_belongs_to_the_dataloader_is_not_taken_twice() -> None:
    with pytest.raises(UsageError, match="shuffle, drop_last and collate_fn belong to the DataLoader"):
        loader_of(DataLoader(tensors(), 2), shuffle=True)


def test_an_order_over_something_else_is_kept() -> None:
    dataset = TensorDataset(torch.arange(50))
    steps = steps_of(lambda: DataLoader(dataset, 2, sampler=RandomSampler(range(20))), 2)
    assert sorted(indices_of(steps)) == list(range(20))


def test_positions_from_the_end_count_as_in_indexing() -> None:
    backwards = Subset(tensors(), [-1, 5, -3])
    assert indices_of(steps_of(lambda: backwards)) == [SIZE - 1, 5, SIZE - 3]
    assert indices_of(steps_of(lambda: DataLoader(tensors(), 2, sampler=[-1, 0]))) == [SIZE - 1, 0]
    assert indices_of(steps_of(lambda: DataLoader(backwards, 2, sampler=[-1, 0]))) == [SIZE - 3, SIZE - 1]

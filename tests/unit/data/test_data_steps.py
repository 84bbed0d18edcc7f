"""The same samples in the same step, each once, with the same draws, on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from data_sources import (
    CPU,
    SIZE,
    AtOnce,
    Augmented,
    Files,
    OwnIterator,
    Split,
    Stateful,
    Uneven,
    Unsplit,
    Wrapping,
    indices_of,
    loader_of,
    steps_of,
    tensors,
)
from instep import UsageError
from instep.train.data.loader import build_loader
from instep.train.slots import plan_slots

SOURCES = {
    "tensors": (tensors, {"shuffle": True}),
    "tensors in order": (tensors, {}),
    "subset": (lambda: Subset(Subset(tensors(), range(SIZE - 1, -1, -1)), range(SIZE)), {"shuffle": True}),
    "augmented": (Augmented, {"shuffle": True}),
    "at once": (AtOnce, {"shuffle": True}),
    "list": (lambda: [(index, index * 0.5) for index in range(SIZE)], {}),
    "loader": (lambda: DataLoader(Augmented(), batch_size=2, shuffle=True), {}),
    "split": (Split, {}),
    "unsplit": (Unsplit, {}),
    "files": (Files, {}),
    "own iterator": (OwnIterator, {}),
    "wrapping": (Wrapping, {}),
    "uneven": (Uneven, {}),
    "stateful": (Stateful, {}),
    "iterable loader": (lambda: DataLoader(Split(), batch_size=2), {}),
}
EXPECTED = {
    "files": list(range(100)),
    "uneven": sorted(1000 * stream + index for stream in range(8) for index in range(5 * stream)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_number_of_ranks_gets_the_same_steps(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    assert sorted(indices_of(one)) == EXPECTED.get(name, list(range(SIZE)))
    for world_size in (2, 3, 4, 8):
        assert steps_of(make, world_size, **options) == one


@pytest.mark.parametrize("name", SOURCES)
def test_asking_for_the_next_step_early_changes_nothing(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    assert steps_of(make, 3, looks_ahead=True, **options) == one


@pytest.mark.parametrize("name", SOURCES)
def test_an_epoch_can_be_entered_at_any_step(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    last = max(step for step, _ in one)
    for first in {1, last // 2, last, last + 1}:
        rest = steps_of(make, world_size=1 + first % 3, first_step=first, **options)
        assert rest == {key: value for key, value in one.items() if key[0] >= first}


@pytest.mark.parametrize("name", ["augmented", "split", "unsplit", "files"])
def test_what_ran_before_changes_nothing(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    random.seed(99)
    torch.manual_seed(99)
    numpy.random.seed(99)
    assert steps_of(make, **options) == one


@pytest.mark.parametrize("name", ["tensors", "augmented", "split", "files"])
def test_epochs_and_seeds_differ(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    if name == "tensors":
        assert indices_of(steps_of(make, epoch=2, **options)) != indices_of(one)
    assert steps_of(make, epoch=2, **options) != one
    assert steps_of(make, seed=4, **options) != one
    assert steps_of(make, **options) == one


def test_step_k_takes_its_slice_of_the_order() -> None:
    steps = steps_of(tensors, 4)
    for (step, slot), (count, data) in steps.items():
        first = step * 16 + slot * 2
        assert data[0] == list(range(first, min(first + 2, SIZE)))
        assert count == len(data[0])
    assert [key for key in steps if key[0] == 6] == [(6, 0), (6, 1), (6, 2), (6, 3)]  # 103 = 6 * 16 + 7
    assert steps[6, 3][0] == 1


def test_drop_last_drops_the_short_step_only() -> None:
    steps = steps_of(tensors, 2, drop_last=True)
    assert indices_of(steps) == list(range(96))
    assert len(loader_of(tensors(), drop_last=True)) == 6
    assert len(loader_of(tensors())) == 7


@pytest.mark.parametrize(
    "make",
    [tensors, lambda: DataLoader(tensors(), 4, sampler=range(SIZE)), lambda: DataLoader(tensors(), 4, sampler=Ends())],
)
def test_a_short_step_can_be_spread_over_all_slots(make: Any) -> None:
    got = []
    for rank in range(4):
        epoch = loader_of(make(), rank, 4, micro_batch=4).start_epoch(0, 5, spread=True)
        for step in (5, 6):
            (batch,) = epoch.next_step()
            got.append((step, batch.slot, batch.data[0].tolist()))
        assert not epoch.has_next()
    assert [data for step, _, data in sorted(got) if step == 5] == [
        [80 + 4 * slot + i for i in range(4)] for slot in range(4)
    ]
    assert [data for step, _, data in sorted(got) if step == 6] == [[96], [97, 98], [99, 100], [101, 102]]


class Ends:
    """A sampler that does not know its length."""

    def __iter__(self) -> Iterator[int]:
        yield from range(SIZE)


def test_a_step_that_is_too_short_to_be_spread_is_refused() -> None:
    loader = loader_of(TensorDataset(torch.arange(18)), 1, 4, micro_batch=4)
    with pytest.raises(UsageError) as error:
        loader.start_epoch(0, spread=True)
    assert str(error.value) == (
        "the last step of the epoch has 2 samples for 4 ranks, and sync_batch_norm=True needs one on each. "
        "Give run.loader drop_last=True, or a dataset that leaves more over."
    )
    loader_of(TensorDataset(torch.arange(18)), 1, 4, micro_batch=4, drop_last=True).start_epoch(0, spread=True)


@pytest.mark.parametrize("make", [Split, Unsplit])
def test_drop_last_leaves_no_short_micro_batch_of_a_stream(make: type) -> None:
    one = steps_of(make, drop_last=True)
    assert {count for count, _ in one.values()} == {2}
    assert 80 <= len(indices_of(one)) < SIZE
    assert steps_of(make, 4, drop_last=True) == one


def test_a_rank_without_samples_in_the_last_step_still_has_the_step() -> None:
    epoch = loader_of(tensors(), rank=1, world_size=2).start_epoch(0)
    sizes = []
    while epoch.has_next():
        sizes.append(len(epoch.next_step()))
    assert sizes == [4, 4, 4, 4, 4, 4, 0]


def test_ended_streams_give_empty_steps_as_long_as_others_go_on() -> None:
    epoch = loader_of(Uneven(), rank=0, world_size=8).start_epoch(0)
    assert not epoch.has_next()  # stream 0 has no samples
    assert [len(epoch.next_step()) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("name", ["tensors", "augmented", "split", "unsplit"])
def test_a_step_iterated_again_gives_the_same_micro_batches(name: str) -> None:
    make, options = SOURCES[name]
    batches = loader_of(make(), **options).start_epoch(0).next_step()
    assert len(batches) == 8
    first = next(iter(batches))  # left after one
    again, once_more = list(batches), list(batches)
    assert len(again) == 8
    assert again[0] is first
    assert all(one is other for one, other in zip(again, once_more))


@pytest.mark.parametrize("name", ["augmented", "split", "unsplit", "files"])
def test_micro_batches_that_nobody_takes_change_no_others(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    epoch = loader_of(make(), **options).start_epoch(1)
    for step in range(5):
        for position, micro_batch in enumerate(epoch.next_step()):
            assert one[step, micro_batch.slot][1][0] == micro_batch.data[0].tolist()
            if position == step:
                break
    assert {index for batch in epoch.next_step() for index in batch.data[0].tolist()} == {
        index for key, (_, data) in one.items() if key[0] == 5 for index in data[0]
    }


def test_tensors_come_bit_equal_to_stacked_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(SIZE, 2, 3, generator=generator),
        torch.arange(SIZE),
        torch.rand(SIZE, generator=generator) > 0.5,
        torch.randn(SIZE, 4, generator=generator, dtype=torch.float16),
    )
    dataset.tensors[0][0, 0, 0] = float("nan")
    got = [batch.data for batch in loader_of(dataset, global_batch=8, micro_batch=8).start_epoch(0).next_step()]
    (expected, *_) = DataLoader(dataset, batch_size=8)
    assert len(got) == 1
    assert type(got[0]) is type(expected)
    for ours, theirs in zip(got[0], expected):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_the_user_writes_into_a_batch_does_not_reach_the_dataset(shuffle: bool) -> None:
    dataset = tensors()
    before = dataset.tensors[1].clone()
    for batch in loader_of(dataset, shuffle=shuffle).start_epoch(0).next_step():
        batch.data[1].zero_()
    assert torch.equal(dataset.tensors[1], before)


def test_tensors_that_are_not_plain_are_stacked() -> None:
    images = torch.randn(SIZE, 3, 4, 4).to(memory_format=torch.channels_last)
    got = next(iter(loader_of(TensorDataset(images)).start_epoch(0).next_step())).data[0]
    expected = next(iter(DataLoader(TensorDataset(images), batch_size=2)))[0]
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()


def test_global_generators_are_left_alone_by_starting_an_epoch() -> None:
    loader = loader_of(DataLoader(Augmented(), 2, sampler=WeightedRandomSampler([1.0] * SIZE, 50)))
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    loader.start_epoch(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]


def test_the_dataset_is_told_the_epoch() -> None:
    class Told(Augmented):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    dataset = Told()
    loader_of(dataset).start_epoch(7)
    assert dataset.epoch == 7


def test_a_loader_says_how_it_is_read() -> None:
    with pytest.raises(TypeError, match=r"read through run\.steps\(loader, epochs=\.\.\.\) or run\.evaluate"):
        iter(loader_of(tensors()))
    with pytest.raises(TypeError, match=r"unknown: Split is iterable.*run\.steps\(loader, steps=\.\.\.\)"):
        len(loader_of(Split()))


def test_random_sizes_of_everything_agree() -> None:
    """Property: whatever the sizes, the union over ranks is one epoch, cut in the same way."""
    draw = random.Random(0)
    for _ in range(25):
        micro_batch, count = draw.randint(1, 4), draw.randint(1, 9)
        size, world_size = draw.randint(1, 60), draw.randint(1, count)
        dataset = TensorDataset(torch.arange(size))
        got: dict[int, list[int]] = {}
        for rank in range(world_size):
            slots = plan_slots(micro_batch * count, micro_batch, rank, world_size)
            loader = build_loader(
                dataset, slots=slots, seed=1, device=CPU, local_size=1, shuffle=True, num_workers=0, say=print
            )
            epoch = loader.start_epoch(3)
            step = 0
            while epoch.has_next():
                for batch in epoch.next_step():
                    got.setdefault(step, []).extend(batch.data[0].tolist())
                step += 1
            assert step == epoch.num_steps == len(loader)
        flat = [index for step in sorted(got) for index in got[step]]
        whole = torch.randperm(size, generator=torch.Generator().manual_seed(_order_seed()))
        assert flat == whole.tolist()


def _order_seed() -> int:
    from instep.train.seeds import ORDER, mix

    return mix(ORDER, 1, 3)

"""Iterable datasets as virtual streams: what they see, how they go on, that nothing is lost or doubled."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from data_sources import SIZE, OwnIterator, Split, Stateful, Unsplit, as_lists, indices_of, loader_of, steps_of
from instep.train.data.own_copy import own_copy
from instep.train.data.torch_worker import ShownWorker, can_show, showing


class Looking(IterableDataset):
    """Notes what it is shown."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield info.id, info.num_workers, info.seed - info.id, info.dataset is self


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return itertools.count(info.id, info.num_workers)


def states_at(loaders: list[Any], epochs: list[Any]) -> dict[int, Any]:
    return {slot: state for epoch in epochs for slot, state in epoch.stream_states().items()}


def test_torch_still_keeps_the_worker_where_we_set_it() -> None:
    assert can_show()
    shown = ShownWorker(2, 5, 100, "dataset")
    with showing(shown):
        info: Any = get_worker_info()
        assert not shown.was_asked
        assert (info.id, info.num_workers, info.seed, info.dataset) == (2, 5, 102, "dataset")
        assert shown.was_asked
    assert get_worker_info() is None


def test_torch_elsewhere_means_that_streams_are_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.train.data.streams.can_show", lambda: False)
    monkeypatch.setattr("instep.train.data.loader.can_show", lambda: False)
    monkeypatch.setattr("instep.train.data.stream_reader.showing", lambda shown: torch.no_grad())
    one = steps_of(Split)
    assert sorted(indices_of(one)) == list(range(SIZE))
    assert steps_of(Split, 4) == one
    assert loader_of(Split(), num_workers=2).num_workers == 0


def test_a_stream_sees_itself_as_one_worker_of_the_number_of_slots() -> None:
    steps = steps_of(Looking, 3, micro_batch=1, global_batch=5)
    seen = [data for _, data in steps.values()]
    assert [(ids, counts) for ids, counts, *_ in seen] == [([slot], [5]) for slot in range(5)]
    assert len({seed[0] for _, _, seed, _ in seen}) == 1
    assert all(own == [True] for *_, own in seen)
    assert get_worker_info() is None


def test_a_dataset_that_never_asks_is_dealt_out_sample_by_sample() -> None:
    said: list[str] = []
    steps = steps_of(Unsplit, 2, say=said.append)
    assert [data[0] for (step, _), (_, data) in steps.items() if step == 0] == [[slot, slot + 8] for slot in range(8)]
    expected = (
        "Unsplit does not ask torch.utils.data.get_worker_info() which part to read, so each of 2 processes reads "
        "all of it and keeps its share"
    )
    assert said == [expected, expected]  # one for each rank


def test_collating_does_not_take_this_process_for_a_worker() -> None:
    batch = next(iter(loader_of(Split()).start_epoch(0).next_step()))
    assert not batch.data[1].is_shared()  # default_collate uses shared memory in workers


def test_an_infinite_dataset_is_never_read_ahead_by_more_than_a_sample() -> None:
    steps = steps_of(Endless, 2, most=4)
    assert sorted(indices_of_plain(steps)) == list(range(64))


def indices_of_plain(steps: Any) -> list[int]:
    return [index for _, data in steps.values() for index in data]


def test_a_generator_inside_a_dataset_may_be_shared() -> None:
    class Live(IterableDataset):
        def __init__(self) -> None:
            self.numbers = iter(range(64))

        def __iter__(self) -> Iterator[int]:
            return iter(self.numbers)

    assert sorted(indices_of_plain(steps_of(Live))) == list(range(64))


def test_chained_datasets_keep_their_own_positions() -> None:
    class Reader(IterableDataset):
        def __init__(self, first: int) -> None:
            self.first = first
            self.source = OwnIterator()

        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            for index, _ in self.source:
                if index % info.num_workers == info.id:
                    yield (self.first + index,)

    steps = steps_of(lambda: ChainDataset([Reader(0), Reader(1000)]), 2)
    assert sorted(indices_of(steps)) == [*range(SIZE), *range(1000, 1000 + SIZE)]


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("stop", [1, 3, 6, 7, 9])
def test_a_dataset_with_a_state_goes_on_without_reading_again(splits: bool, stop: int) -> None:
    one = steps_of(lambda: Stateful(splits))
    loaders = [loader_of(Stateful(splits), rank, 2) for rank in range(2)]
    epochs = [loader.start_epoch(1) for loader in loaders]
    for number in range(stop):
        for epoch in epochs:
            batches = epoch.next_step()
            if number % 2:
                epoch.has_next()
            assert len(list(batches)) == len(batches)
    states = states_at(loaders, epochs)
    assert sorted(states) == list(range(8))
    for world_size in (1, 3):
        rest: dict[tuple[int, int], Any] = {}
        for rank in range(world_size):
            dataset = Stateful(splits)
            epoch = loader_of(dataset, rank, world_size).start_epoch(1, stop, states)
            step = stop
            while epoch.has_next():
                for batch in epoch.next_step():
                    rest[step, batch.slot] = batch.num_samples, as_lists(batch.data)
                step += 1
            assert not set(dataset.made) & {
                index for key, (_, data) in one.items() if key[0] < stop for index in data[0]
            }
        assert rest == {key: value for key, value in one.items() if key[0] >= stop}


def test_looking_for_the_next_step_does_not_change_the_state() -> None:
    epoch = loader_of(Stateful()).start_epoch(1)
    states = []
    for _ in range(3):
        list(epoch.next_step())
        before = epoch.stream_states()
        assert epoch.has_next()
        assert epoch.stream_states() == before
        states.append(before)
    assert [state[0]["dataset"]["position"] for state in states] == [2, 4, 6]


def test_the_state_counts_micro_batches_that_nobody_took() -> None:
    epoch = loader_of(Stateful()).start_epoch(1)
    epoch.next_step()
    next(iter(epoch.next_step()))
    assert [state["dataset"]["position"] for state in epoch.stream_states().values()] == [4] * 8


def test_a_state_asked_for_at_once_is_the_one_given() -> None:
    epoch = loader_of(Stateful()).start_epoch(1)
    list(epoch.next_step())
    states = epoch.stream_states()
    again = loader_of(Stateful()).start_epoch(1, 1, states)
    assert again.stream_states() == states
    assert again.has_next()
    assert again.stream_states() == states


def test_without_a_state_there_is_nothing_to_keep_but_the_ends() -> None:
    epoch = loader_of(Split()).start_epoch(1)
    assert epoch.stream_states() == dict.fromkeys(range(8))
    list(epoch.next_step())
    assert epoch.stream_states() == dict.fromkeys(range(8))
    while epoch.has_next():
        list(epoch.next_step())
    assert all(state["ended"] for state in epoch.stream_states().values())
    assert loader_of([1] * 20).start_epoch(0).stream_states() is None


def test_slow_reading_up_to_a_step_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.train.data.loader.SLOW_RESUME_SECONDS", 0.0)
    said: list[str] = []
    loader_of(Split(), say=said.append).start_epoch(0, 3).has_next()
    assert said == [
        "going on inside the epoch took 0 s of reading Split from its start; a dataset with state_dict and "
        "load_state_dict goes on at once"
    ]


def test_each_epoch_starts_from_the_dataset_as_it_was_given() -> None:
    dataset = Stateful()
    loader = loader_of(dataset)
    for _ in range(2):
        epoch = loader.start_epoch(0)
        first = list(epoch.next_step())
        assert [index for batch in first for index in batch.data[0].tolist()] == [
            index for slot in range(8) for index in (slot, slot + 8)
        ]
    assert dataset.position == 0


def test_random_streams_lose_and_double_nothing() -> None:
    """Property: streams of any lengths, on any number of ranks, entered anywhere."""
    draw = random.Random(1)
    for _ in range(15):
        micro_batch, count = draw.randint(1, 3), draw.randint(1, 6)
        lengths = [draw.randint(0, 12) for _ in range(count)]

        class Given(IterableDataset):
            def __iter__(self, lengths: list[int] = lengths) -> Iterator[Any]:
                info = get_worker_info()
                assert info is not None
                for index in range(lengths[info.id]):
                    yield 100 * info.id + index, random.random()

        sizes = {"micro_batch": micro_batch, "global_batch": micro_batch * count}
        one = steps_of(Given, **sizes)
        expected = sorted(100 * stream + index for stream, size in enumerate(lengths) for index in range(size))
        assert sorted(indices_of(one)) == expected
        world_size, first = draw.randint(1, count), draw.randint(0, 6)
        rest = steps_of(Given, world_size, first_step=first, **sizes)
        assert rest == {key: value for key, value in one.items() if key[0] >= first}


def test_data_are_shared_by_the_copies_of_a_dataset(tmp_path: Path) -> None:
    class Tokens(IterableDataset):
        def __init__(self) -> None:
            self.on_disk = numpy.memmap(tmp_path / "tokens", dtype="int32", mode="w+", shape=(64,))
            self.tensor = torch.zeros(3)
            self.many = [OwnIterator() for _ in range(1001)]
            self.readers = [OwnIterator()]
            self.by_name = {"a": OwnIterator()}
            self.lock = threading.Lock()

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    dataset = Tokens()
    clone = own_copy(dataset)
    assert clone is not dataset
    for name in ("on_disk", "tensor", "many", "lock"):
        assert getattr(clone, name) is getattr(dataset, name)
    assert clone.readers[0] is not dataset.readers[0]
    assert clone.by_name["a"] is not dataset.by_name["a"]


def test_a_dataset_that_cannot_be_copied_is_shared() -> None:
    class Whole(IterableDataset):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("cannot pickle")

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    dataset = Whole()
    assert own_copy(dataset) is dataset


def test_parts_that_know_each_other_still_do_in_a_copy() -> None:
    class Part(OwnIterator):
        def __init__(self, whole: Any) -> None:
            self.whole = whole

    class Whole(IterableDataset):
        def __init__(self) -> None:
            self.part = Part(self)

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    dataset = Whole()
    clone = own_copy(dataset)
    assert clone.part is not dataset.part
    assert clone.part.whole is clone

"""Worker processes read the same samples, with the same draws, as the main process does."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info

from data_sources import (
    SIZE,
    AtOnce,
    Augmented,
    Files,
    Split,
    Stateful,
    Uneven,
    Unsplit,
    as_lists,
    indices_of,
    loader_of,
    steps_of,
    tensors,
)
from instep import UsageError
from instep.train.data import workers

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # three workers on two cores
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # torch forks, from 3.12
]
SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "tensors": (tensors, {"shuffle": True}),
    "augmented": (Augmented, {"shuffle": True}),
    "at once": (AtOnce, {"drop_last": True}),
    "weighted": (lambda: DataLoader(Augmented(), 2, sampler=WeightedRandomSampler([1.0] * SIZE, 61)), {}),
    "drawing": (lambda: DataLoader(Augmented(), 2, sampler=Wandering()), {}),
    "split": (Split, {}),
    "unsplit": (Unsplit, {}),
    "files": (Files, {}),
    "uneven": (Uneven, {}),
    "stateful": (Stateful, {}),
}


class Wandering:
    """A sampler that draws as it goes."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(61):
            yield random.randrange(SIZE)


@pytest.mark.parametrize("name", SOURCES)
def test_workers_change_nothing(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    for world_size, num_workers in ((1, 1), (1, 3), (3, 2)):
        ahead = world_size == 3
        assert steps_of(make, world_size, num_workers=num_workers, looks_ahead=ahead, **options) == one


@pytest.mark.parametrize("name", ["augmented", "drawing", "split", "unsplit", "uneven"])
def test_workers_begin_at_any_step(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    rest = steps_of(make, 2, first_step=2, num_workers=2, **options)
    assert rest == {key: value for key, value in one.items() if key[0] >= 2}


@pytest.mark.parametrize("name", ["augmented", "drawing", "split"])
def test_micro_batches_that_nobody_takes_change_no_others(name: str) -> None:
    make, options = SOURCES[name]
    one = steps_of(make, **options)
    loader = loader_of(make(), num_workers=2, **options)
    epoch = loader.start_epoch(1)
    for step in range(3):
        for position, batch in enumerate(epoch.next_step()):
            assert one[step, batch.slot] == (batch.num_samples, as_lists(batch.data))
            if position == step:
                break
    epoch.close()
    loader.close()


@pytest.mark.parametrize("splits", [True, False])
def test_workers_hand_over_the_states_of_their_streams(splits: bool) -> None:
    one = steps_of(lambda: Stateful(splits))
    loader = loader_of(Stateful(splits), num_workers=3)
    epoch = loader.start_epoch(1)
    states = [epoch.stream_states()]
    for _ in range(4):
        next(iter(epoch.next_step()))
        states.append(epoch.stream_states())
        epoch.has_next()
        assert epoch.stream_states() == states[-1]
    epoch.close()
    loader.close()
    assert states[0] == dict.fromkeys(range(8))
    assert states[4][7]["dataset"] == {"position": 64 if not splits else 8}
    for num_workers in (0, 2):
        again = loader_of(Stateful(splits), num_workers=num_workers)
        resumed = again.start_epoch(1, 4, states[4])
        assert resumed.stream_states() == states[4]
        got = {(4, batch.slot): (batch.num_samples, as_lists(batch.data)) for batch in resumed.next_step()}
        assert got == {key: value for key, value in one.items() if key[0] == 4}
        resumed.close()
        again.close()


class Where(Dataset):
    """Says which process read the sample, and what the epoch was."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, int]:
        return os.getpid(), self.epoch


@pytest.mark.parametrize("keeps", [None, False])
def test_workers_are_kept_between_epochs_unless_refused(keeps: bool | None) -> None:
    loader = loader_of(Where(), num_workers=2, persistent_workers=keeps)
    readers = []
    for number in range(3):
        epoch = loader.start_epoch(number)
        seen: set[int] = set()
        for step in range(4 if number else 1):  # the first epoch is left early
            for batch in epoch.next_step():
                seen |= set(batch.data[0].tolist())
                assert set(batch.data[1].tolist()) == {number}, step
        epoch.close()
        readers.append(seen)
    loader.close()
    assert os.getpid() not in set.union(*readers)
    assert (readers[0] == readers[1] == readers[2]) is (keeps is None)
    assert all(len(seen) == 2 for seen in readers)


@pytest.mark.parametrize("keeps", [True, False])
def test_closing_ends_the_workers_at_once(keeps: bool) -> None:
    """Without waiting for the garbage collector; torch's way to do so is private."""
    loader = loader_of(Where(), num_workers=1, persistent_workers=keeps)
    epoch = loader.start_epoch(0)
    pids = {pid for batch in epoch.next_step() for pid in batch.data[0].tolist()}
    epoch.close()
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_two_epochs_of_a_loader_at_once_do_not_disturb_each_other() -> None:
    loader = loader_of(Augmented(), num_workers=1)
    one = steps_of(Augmented)
    outer = loader.start_epoch(1)
    got = {}
    for step in range(2):
        for batch in outer.next_step():
            got[step, batch.slot] = batch.num_samples, as_lists(batch.data)
        inner = loader.start_epoch(1)
        assert [as_lists(batch.data) for batch in inner.next_step()] == [one[0, slot][1] for slot in range(8)]
        inner.close()
    outer.close()
    loader.close()
    assert got == {key: value for key, value in one.items() if key[0] < 2}


class Fails(Dataset):
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.error is not None and index == 5:
            raise self.error
        return torch.zeros(index + 1)


def test_bad_samples_are_a_sentence_from_a_worker_too() -> None:
    loader = loader_of(Fails(None), num_workers=1)
    epoch = loader.start_epoch(0)
    with pytest.raises(UsageError) as error:
        list(epoch.next_step())
    epoch.close()
    loader.close()
    assert str(error.value).startswith("the samples at positions 0, 1 of the dataset cannot be joined into a micro-")
    assert "Traceback" not in str(error.value)


def test_an_error_of_the_dataset_comes_with_its_own_type() -> None:
    loader = loader_of(Fails(LookupError("mine")), num_workers=1, collate_fn=list)
    epoch = loader.start_epoch(0)
    with pytest.raises(LookupError, match="mine"):
        list(epoch.next_step())
    epoch.close()
    loader.close()


class Prepared(Dataset):
    def __init__(self) -> None:
        self.offset = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index + self.offset


class PreparedStream(IterableDataset):
    offset = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id + self.offset, 64 + self.offset, info.num_workers)


def prepare(worker_id: int) -> None:
    info: Any = get_worker_info()
    assert info.id == worker_id
    info.dataset.offset = 100


@pytest.mark.parametrize("make", [Prepared, PreparedStream])
def test_worker_init_fn_reaches_the_users_dataset(make: type) -> None:
    steps = steps_of(make, 2, num_workers=2, worker_init_fn=prepare)
    assert sorted(index for _, data in steps.values() for index in data) == list(range(100, 164))


def test_workers_started_anew_read_the_same(tmp_path: Any) -> None:
    """Under spawn the dataset is sent; it is the start method of Python 3.14 in effect."""
    one = steps_of(Augmented, most=1)
    assert steps_of(Augmented, most=1, num_workers=1, multiprocessing_context="spawn") == one


def test_the_settings_of_a_dataloader_are_kept() -> None:
    loader = loader_of(DataLoader(Where(), 2, num_workers=1, persistent_workers=False), num_workers=None)
    assert loader.num_workers == 1
    steps = []
    for _ in range(2):
        epoch = loader.start_epoch(0)
        steps.append({pid for batch in epoch.next_step() for pid in batch.data[0].tolist()})
        epoch.close()
    assert not steps[0] & steps[1]


def test_global_generators_are_left_alone_by_starting_workers() -> None:
    before = torch.get_rng_state(), random.getstate()
    loader = loader_of(tensors(), num_workers=1)
    loader.start_epoch(0).close()
    loader.close()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Slow(Augmented):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


def test_workers_start_in_the_middle_of_an_epoch_when_reading_is_measured_as_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("instep.train.data.loader.spare_cores", lambda local_size, device: 2)
    monkeypatch.setattr(workers, "MEASURED_STEPS", 3)
    one = steps_of(Augmented, shuffle=True)
    said: list[str] = []
    loader = loader_of(Slow(), shuffle=True, num_workers=None, say=said.append)
    assert loader.num_workers is None
    epoch = loader.start_epoch(1)
    got = {}
    for step in range(7):
        for batch in epoch.next_step():
            got[step, batch.slot] = batch.num_samples, as_lists(batch.data)
    assert not epoch.has_next()
    epoch.close()
    assert loader.num_workers == 2
    assert len(said) == 1
    assert said[0].startswith("num_workers=2: fetching took ")
    assert said[0].endswith("over 3 steps), 2 cores to spare (set run.loader(num_workers=...) to change it)")
    loader.close()
    assert got == one
    assert sorted(indices_of(one)) == list(range(SIZE))

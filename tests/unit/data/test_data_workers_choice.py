"""The number of worker processes that is chosen when none is given, and the reason."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from data_sources import CPU, Augmented, Split, loader_of, tensors
from instep.records.choice import Choice
from instep.train.data.workers import (
    MeasuringFeed,
    check_sendable,
    choose_num_workers,
    choose_without_measuring,
    find_unsendable,
    spare_cores,
)


class Holding(Dataset):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


class Steps:
    """A feed that only counts."""

    num_steps: int | None = 100
    may_run_ahead = True

    def has(self, step: int) -> bool:
        return True

    def slots(self, step: int) -> list[int]:
        return [0]

    def fetch(self, step: int, slot: int) -> tuple[int, Any]:
        return 1, step

    def states(self, step: int) -> None:
        return None

    def close(self) -> None:
        pass


def test_tensors_in_memory_never_want_workers() -> None:
    said: list[str] = []
    assert loader_of(tensors(), num_workers=None, say=said.append).num_workers == 0
    assert said == [
        "num_workers=0: the data are tensors in memory, which no other process reads faster "
        "(set run.loader(num_workers=...) to change it)"
    ]


def test_without_cores_to_spare_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert spare_cores(1, CPU) == 0
    assert spare_cores(1, torch.device("cuda", 0)) == 1
    choice = choose_without_measuring(False, 0)
    assert choice is not None
    assert str(choice).startswith("num_workers=0: the ranks of this machine leave no core to spare")


def test_spare_cores_are_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)
    assert spare_cores(4, CPU) == 6
    assert spare_cores(8, torch.device("cuda", 0)) == 3


@pytest.mark.parametrize(
    ("fetching", "step", "micro_batches", "number"),
    [(0.001, 1.0, 1, 0), (0.5, 1.0, 1000, 0), (0.2, 1.0, 1, 1), (0.5, 1.0, 1, 1), (0.75, 1.0, 1, 3), (0.99, 1.0, 1, 4)],
)
def test_the_number_follows_from_the_share_of_fetching(
    fetching: float, step: float, micro_batches: int, number: int
) -> None:
    choice = choose_num_workers(fetching, step, micro_batches, spare=4)
    assert choice.value == number
    assert choice.reason.startswith(f"fetching took {fetching / step:.0%} of a step (")


def test_what_does_not_survive_in_another_process_keeps_the_dataset_here(tmp_path: Path) -> None:
    assert find_unsendable(Augmented()) is None
    assert find_unsendable(Holding(torch.zeros(3))) is None
    with open(tmp_path / "data", "w+b") as file:
        assert "cannot pickle" in str(find_unsendable(Holding([file])))
        choice = check_sendable(Choice("num_workers", 2, "slow", "x"), Holding(file))
    assert choice.value == 0
    assert choice.reason.startswith("slow, but the dataset cannot be copied to other processes (cannot pickle ")
    wanted = Choice("num_workers", 2, "slow", "x")
    assert check_sendable(wanted, Augmented()) is wanted
    connection = sqlite3.connect(":memory:")
    assert find_unsendable(Holding(connection)) is not None
    connection.close()


def test_looking_for_what_cannot_be_sent_does_not_copy_the_data() -> None:
    class Heavy(torch.Tensor):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise AssertionError("pickled")

    assert find_unsendable(Holding(torch.zeros(3).as_subclass(Heavy))) is None


def test_streams_stay_in_the_main_process_unless_asked() -> None:
    assert loader_of(Split(), num_workers=None).num_workers == 0
    assert loader_of(Split(), num_workers=20).num_workers == 8  # one for a stream at most


def test_the_measuring_leaves_the_first_steps_out_and_ends() -> None:
    decided: list[Any] = []

    def decide(choice: Any, step: int) -> None:
        decided.append((choice, step))

    feed = MeasuringFeed(Steps(), 1, decide)
    for step in range(5, 40):
        assert list(feed.slots(step)) == [0]
        assert feed.fetch(step, 0) == (1, step)
    ((choice, step),) = decided
    assert step == 5 + 17
    assert choice.value == 0

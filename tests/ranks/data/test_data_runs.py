"""Whole runs on several ranks: what each step was made of, agreed between the ranks, and evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instep
from data_sources import SIZE, Augmented, Split, Uneven, Unsplit, tensors
from run_ranks import run_ranks


class Batches:
    """Batches of one or two samples, in an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(45):
            yield [random.randrange(SIZE) for _ in range(random.randint(1, 2))]


def workers(number: int) -> dict[str, Any]:
    """Forked, since these ranks come from a fork server, and would start one for their workers that imports torch."""
    return {"num_workers": number, "multiprocessing_context": "fork"}


SOURCES: dict[str, Any] = {
    "augmented": lambda: (Augmented(), {"shuffle": True, **workers(1)}),
    "batches": lambda: (DataLoader(tensors(), batch_sampler=Batches()), {}),
    "split": lambda: (Split(), workers(2)),
    "unsplit": lambda: (Unsplit(), {}),
    "uneven": lambda: (Uneven(), {}),
}


def train(rank: int, size: int, name: str) -> Any:
    """By step, the samples of all ranks in slot order, with the loss that they gave."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    with instep.Run(global_batch=16, micro_batch=2, seed=5) as run:
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        source, options = SOURCES[name]()
        history = []
        for step in run.steps(run.loader(source, **options), epochs=2):
            mine = []
            for data in step:
                mine += data[0].tolist()
                step.backward(model(data[0].double().unsqueeze(1) / 1000).square().mean())
            step.update()
            samples = [index for part in run.gather(mine) for index in part]
            history.append((step.epoch, step.ends_epoch, samples, round(step.loss, 9)))
    return history


@cache
def alone(name: str) -> Any:
    return run_ranks(train, 1, name)[0]


@pytest.mark.parametrize("name", SOURCES)
def test_every_step_is_the_same_on_three_ranks(name: str) -> None:
    assert run_ranks(train, 3, name) == [alone(name)] * 3


@pytest.mark.parametrize("name", ["augmented", "split", "unsplit"])
def test_an_epoch_gives_each_sample_once_and_says_when_it_ends(name: str) -> None:
    history = alone(name)
    for number in (0, 1):
        steps = [step for step in history if step[0] == number]
        assert sorted(index for _, _, samples, _ in steps for index in samples) == list(range(SIZE))
        assert [ends for _, ends, _, _ in steps] == [False] * (len(steps) - 1) + [True]


def evaluate(rank: int, size: int, kind: str) -> Any:
    source: Any = {
        "tensors": TensorDataset(torch.arange(21)),
        "stream": Split(21),
        "one": TensorDataset(torch.arange(1)),
    }
    with instep.Run(global_batch=16, micro_batch=2) as run:
        seen = [index for data in run.evaluate(run.loader(source[kind])) for index in data[0].tolist()]
        return run.gather(seen)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("kind", "count"), [("tensors", 21), ("stream", 21), ("one", 1)])
def test_an_evaluation_counts_each_sample_once(kind: str, count: int, size: int) -> None:
    for gathered in run_ranks(evaluate, size, kind):
        assert sorted(index for part in gathered for index in part) == list(range(count))

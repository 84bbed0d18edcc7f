"""Ranks that come with different things, or to different calls: said by all of them, with the ranks and lines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep
from run_ranks import run_ranks


def rows() -> TensorDataset:
    return TensorDataset(torch.ones(32, 3), torch.ones(32, 1))


def open_run(**arguments: Any) -> instep.Run:
    return instep.Run(**{"global_batch": 8, "micro_batch": 2, **arguments})


def prepared(run: instep.Run) -> nn.Module:
    model = nn.Linear(3, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def other_seed(rank: int) -> None:
    with open_run(seed=rank):
        pass


def other_model(rank: int) -> None:
    with open_run() as run:
        model = nn.Linear(3, 1 + rank)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def other_frozen(rank: int) -> None:
    with open_run() as run:
        model = nn.Linear(3, 1)
        model.bias.requires_grad_(rank == 0)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def mean_on_main(rank: int) -> None:
    with open_run() as run:
        model = prepared(run)
        for step in run.steps(run.loader(rows()), epochs=1):
            for x, _ in step:
                step.backward(model(x).mean())
            if run.is_main:
                run.mean(1.0)
            step.update()


def mean_or_sum(rank: int) -> None:
    with open_run() as run:
        run.mean(1.0) if rank else run.sum(1.0)


def leaves_early(rank: int) -> None:
    with open_run() as run:
        model = prepared(run)
        for step in run.steps(run.loader(rows()), epochs=1):
            if rank and step.index == 2:
                break
            for x, _ in step:
                step.backward(model(x).mean())
            step.update()


def local_schedule(rank: int) -> None:
    with open_run() as run:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
        run.schedule(float(rank))


def caught(rank: int, size: int, mistake: Callable[[int], None]) -> str:
    try:
        mistake(rank)
    except instep.RanksDisagree as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        (other_seed, ["different arguments: seed=0 on rank 0, seed=1 on rank 1"]),
        (other_model, ["rank 0 has weight of shape [1, 3]", "rank 1 has weight of shape [2, 3]"]),
        (other_frozen, ["rank 0 has bias", "requires_grad=True; rank 1 has bias", "requires_grad=False"]),
        (
            mean_on_main,
            ["rank 0 came to run.mean at test_disagreement.py:", "rank 1 came to step.update() of step 0 at"],
        ),
        (mean_or_sum, ["rank 0 came to run.sum at test_disagreement.py", "rank 1 came to run.mean at"]),
        (leaves_early, ["rank 0 came to step.update() of step 2", "rank 1 came to the end of its run"]),
        (local_schedule, ["run.schedule got different values on the ranks (0, 1): give it run.mean(value, weight)"]),
    ],
)
def test_all_ranks_say_who_differs(mistake: Callable[[int], None], parts: list[str]) -> None:
    texts = run_ranks(caught, 2, mistake)
    for text in texts[:1] if mistake is leaves_early else texts:  # the rank that left has nothing to say
        for part in parts:
            assert part in text, texts


def stops(rank: int, size: int, folder: str) -> tuple[int, int]:
    steps = 0
    try:
        with open_run(dir=folder) as run:
            model = prepared(run)
            for step in run.steps(run.loader(rows()), epochs=100):
                for x, _ in step:
                    step.backward(model(x).mean())
                if rank == 1 and step.index == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                step.update()
                steps = step.index + 1
    except SystemExit as ended:
        return int(ended.code or 0), steps
    return 0, steps


def continues(rank: int, size: int, folder: str) -> tuple[bool, int]:
    with open_run(dir=folder) as run:
        prepared(run)
        restored = run.restore()
        return restored, next(iter(run.steps(run.loader(rows()), epochs=100))).index


def test_sigterm_on_one_rank_saves_on_all_after_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(stops, 2, str(tmp_path)) == [(143, 6), (143, 6)]  # both end when the loop would go on to step 6
    assert run_ranks(continues, 2, str(tmp_path)) == [(True, 6), (True, 6)]

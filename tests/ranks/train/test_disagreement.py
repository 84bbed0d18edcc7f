"""Ranks that come with different things, or to different calls: said by all of them, with the ranks and lines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep
from instep.train import meeting
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


def other_rate(rank: int) -> None:
    with open_run() as run:
        model = nn.Linear(3, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)))


def train(run: instep.Run, before_update: Callable[[Any, Any], bool], rows_of: Callable[[], Any] = rows) -> None:
    """before_update: gets the step and the optimizer; False leaves the update out."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for step in run.steps(run.loader(rows_of()), epochs=2):
        for x, _ in step:
            step.backward(model(x).square().mean())
        if before_update(step, optimizer):
            step.update()


def changed_rate(rank: int) -> None:
    def change(step: Any, optimizer: Any) -> bool:
        optimizer.param_groups[0]["lr"] = 0.5 if rank and step.index == 2 else 0.1
        return True

    with open_run() as run:
        train(run, change)


def left_out(rank: int) -> None:
    with open_run() as run:
        train(run, lambda step, optimizer: not (rank and step.index == 2))


def other_split(rank: int) -> None:
    def part() -> Any:
        return torch.utils.data.random_split(rows(), [24, 8], torch.Generator().manual_seed(rank))[0]

    with open_run() as run:
        train(run, lambda step, optimizer: True, part)


def other_epochs(rank: int) -> None:
    with open_run() as run:
        prepared(run)
        next(iter(run.steps(run.loader(rows()), epochs=1 + rank)))


def frozen_later(rank: int) -> None:
    def freeze(step: Any, optimizer: Any) -> bool:
        optimizer.param_groups[0]["params"][0].requires_grad_(not (rank and step.index >= 2))
        return True

    with open_run() as run:
        train(run, freeze)


ONE_SPEAKS = (leaves_early, left_out, frozen_later)  # the other has left by then, or hears only of the first's end


def caught(rank: int, size: int, mistake: Callable[[int], None]) -> str:
    meeting.PATIENCE = timedelta(seconds=1)  # in this process, which ends with the test
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
            [
                "rank 0 came to run.mean at test_disagreement.py:",
                "rank 1 came to step.update() of step 0, where gradients are laid out at",
            ],
        ),
        (mean_or_sum, ["rank 0 came to run.sum at test_disagreement.py", "rank 1 came to run.mean at"]),
        (leaves_early, ["rank 0 came to step.update() of step 2", "rank 1 came to the end of its run"]),
        (other_rate, ["came to run.prepare of model 0 with different parts: lr=0.1 on rank 0, lr=0.2 on rank 1."]),
        (
            changed_rate,
            ["step.update() of step 2 with different settings of the optimizer: lr=0.1 on rank 0, lr=0.5 on"],
        ),
        (left_out, ["rank 0 in that of step 2; rank 1 went on to the next step without one. A `continue`"]),
        (other_split, ["came to run.steps with different data or another number of steps: which samples"]),
        (other_epochs, ["different data or another number of steps: epochs=1 on rank 0, epochs=2 on rank 1"]),
        (
            frozen_later,
            ["rank 1 came to step.update() of step 3, where gradients are laid out at", "rank 0 came to step"],
        ),
        (local_schedule, ["run.schedule got different values on the ranks (0, 1): give it run.mean(value, weight)"]),
    ],
)
def test_all_ranks_say_who_differs(mistake: Callable[[int], None], parts: list[str]) -> None:
    texts = run_ranks(caught, 2, mistake)
    told = [all(part in text for part in parts) for text in texts]
    assert any(told) if mistake in ONE_SPEAKS else all(told), texts


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

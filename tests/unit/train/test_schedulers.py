"""Schedulers of torch, stepped once per step and kept in checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR
from torch.utils.data import TensorDataset

import instep


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> ChainedScheduler:
    return ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 8)])


def rates(folder: Path, stop_after: int) -> list[float]:
    """The learning rate after each step, continued from what is kept in the folder."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with instep.Run(global_batch=4, micro_batch=4, dir=folder) as run:
        run.prepare(model, optimizer, warm_up_and_cosine(optimizer))
        train = run.loader(TensorDataset(torch.randn(32, 3)))
        run.restore()
        for step in run.steps(train, steps=6):
            for (inputs,) in step:
                step.backward(model(inputs).mean())
            step.update()
            found.append(optimizer.param_groups[0]["lr"])
            if len(found) == stop_after:
                run.save()
                break
    return found


def test_a_chained_scheduler_steps_and_continues(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    schedule = warm_up_and_cosine(optimizer)
    expected = []
    for _ in range(6):
        optimizer.step()
        schedule.step()
        expected.append(optimizer.param_groups[0]["lr"])

    assert rates(tmp_path, 4) + rates(tmp_path, 2) == expected

"""Checkpoints on several ranks: saved by all, read by any number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instep.train.checkpoint.state import capture, restore
from instep.train.checkpoint.store import Checkpoints
from instep.train.meeting import Meeting
from instep.train.world import World
from run_ranks import run_ranks


def make_world(rank: int, size: int) -> World:
    group = dist.new_group(backend="gloo") if size > 1 else None
    meeting = Meeting(rank, size, group) if group is not None else None
    return World(rank, size, rank, size, torch.device("cpu"), group, meeting)


def make_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 1200), nn.BatchNorm1d(1200), nn.Linear(1200, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + seed))
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 300)).square().sum().backward()
    optimizer.step()


def save_steps(rank: int, size: int, folder: str, steps: int) -> list[float]:
    world = make_world(rank, size)
    model, optimizer = make_training(0)
    checkpoints = Checkpoints(folder, world, keep=2)
    for step in range(1, steps + 1):
        train_step(model, optimizer)
        checkpoints.check()
        tensors, values = capture({"net": model}, {"opt": optimizer})
        checkpoints.save(tensors, {**values, "step": step}, step=step, own_values={"streams": {str(rank): rank}})
    checkpoints.close()
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def continue_from(rank: int, size: int, folder: str) -> tuple[list[float], int, dict[str, int]]:
    world = make_world(rank, size)
    model, optimizer = make_training(1)
    checkpoints = Checkpoints(folder, world, keep=2)
    saved = checkpoints.open()
    restore(saved, saved.values, {"net": model}, {"opt": optimizer})
    checkpoints.close()
    sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    return sums, saved.step, saved.values["streams"]


@pytest.mark.parametrize(("saving", "reading"), [(1, 2), (2, 1), (3, 2)])
def test_any_number_of_ranks_reads_what_any_number_saved(tmp_path: Path, saving: int, reading: int) -> None:
    weights = run_ranks(save_steps, saving, str(tmp_path), 3)[0]
    for sums, step, streams in run_ranks(continue_from, reading, str(tmp_path)):
        assert sums == weights
        assert step == 3
        assert streams == {str(rank): rank for rank in range(saving)}
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-2", "step-3"]
    files = sorted((tmp_path / "checkpoints" / "step-3").glob("*.safetensors"))
    assert len(files) == saving
    assert max(file.stat().st_size for file in files) < 1.2 * min(file.stat().st_size for file in files)

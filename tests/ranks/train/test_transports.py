"""A whole run over each transport: compressed gradients train, shared memory gives the numbers of one process."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep
from instep.train.reduce.shared_region import can_share_memory
from instep.train.world import World
from run_ranks import run_ranks


def train(rank: int, size: int, compress: str | None, on_one_host: bool) -> dict[str, Any]:
    """A regression; the kind of transport, the loss at begin and end, and the weights."""
    if on_one_host:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.manual_seed(0)
    x = torch.randn(64, 20)
    data = TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
    model = nn.Sequential(nn.Linear(20, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    losses = []
    with instep.Run(global_batch=32, compress=compress, threads=1) as run:
        model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        for step in run.steps(run.loader(data, shuffle=True, num_workers=0), epochs=40):
            for inputs, targets in step:
                step.backward(nn.functional.mse_loss(model(inputs), targets))
            step.update()
            losses.append(step.loss)
        kind = type(run._trained[0].reducer.transport).__name__
    threads = [thread.name for thread in threading.enumerate() if "courier" in thread.name]
    return {"kind": kind, "losses": losses, "weights": list(model.state_dict().values()), "threads": threads}


@pytest.mark.parametrize(
    ("compress", "kind"), [("bf16", "CompressedSum"), ("fp16", "CompressedSum"), ("powersgd", "PowerSGD")]
)
def test_compressed_gradients_train_and_ranks_stay_equal(compress: str, kind: str) -> None:
    ranks = run_ranks(train, 2, compress, False)
    for rank in ranks:
        assert rank["kind"] == kind and rank["threads"] == []
        assert sum(rank["losses"][-4:]) < 0.5 * sum(rank["losses"][:4])
        assert all(torch.equal(one, other) for one, other in zip(rank["weights"], ranks[0]["weights"]))


def stop_and_go_on(rank: int, size: int, folder: str, stop_after: int | None) -> list[torch.Tensor]:
    """Fifteen steps with PowerSGD, in one go or continued from a checkpoint."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
    model = nn.Linear(64, 64)
    with instep.Run(global_batch=16, compress="powersgd", threads=1, dir=folder) as run:
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.restore()
        for step in run.steps(run.loader(data, shuffle=True, num_workers=0), steps=15):
            for inputs, targets in step:
                step.backward(nn.functional.mse_loss(model(inputs), targets))
            step.update()
            if step.index == stop_after:
                run.save()
                break
    return list(model.state_dict().values())


def test_what_powersgd_remembers_is_in_the_checkpoint(tmp_path: Any) -> None:
    whole = run_ranks(stop_and_go_on, 2, str(tmp_path / "whole"), None)
    run_ranks(stop_and_go_on, 2, str(tmp_path / "parts"), 12)
    continued = run_ranks(stop_and_go_on, 2, str(tmp_path / "parts"), None)
    for one, other in zip(whole, continued):
        assert all(torch.equal(*pair) for pair in zip(one, other))


@pytest.mark.skipif(
    not can_share_memory(World(0, 2, 0, 2, torch.device("cpu"))), reason="this machine shares no memory this way"
)
@pytest.mark.parametrize("size", [2, 4])
def test_shared_memory_is_chosen_on_one_host_and_changes_no_number(size: int) -> None:
    alone = run_ranks(train, 1, None, False)[0]
    ranks = run_ranks(train, size, None, True)
    for rank in ranks:
        assert rank["kind"] == "SharedSum"
        assert rank["losses"][:20] == pytest.approx(alone["losses"][:20], rel=1e-4)
        assert all(torch.equal(one, other) for one, other in zip(rank["weights"], ranks[0]["weights"]))

"""Checkpoints of tensors on a GPU: copied through pinned memory, restored on either device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from instep.train.checkpoint.state import capture, restore
from instep.train.checkpoint.store import Checkpoints
from instep.train.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make(device: str, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 8)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    optimizer.zero_grad()
    model(torch.ones(4, 64, device=device)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("device", "fused"), [("cuda", True), ("cuda", False), ("cpu", False)])
def test_what_was_saved_on_a_gpu_is_restored_on(tmp_path: Path, device: str, fused: bool) -> None:
    world = World(0, 1, 0, 1, torch.device("cuda", 0))
    model, optimizer = make("cuda", True)
    train(model, optimizer)
    checkpoints = Checkpoints(tmp_path, world)
    tensors, values = capture({"net": model}, {"opt": optimizer})
    checkpoints.reserve(tensors)
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    checkpoints.save(tensors, values, step=1)
    assert checkpoints._image._buffer.is_pinned()
    train(model, optimizer)  # must not reach the save in flight
    other, its_optimizer = make(device, fused)
    saved = checkpoints.open()
    restore(saved, saved.values, {"net": other}, {"opt": its_optimizer})
    checkpoints.close()
    found, _ = capture({"net": other}, {"opt": its_optimizer})
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in expected.items())
    train(other, its_optimizer)  # the step counts lie where this implementation wants them

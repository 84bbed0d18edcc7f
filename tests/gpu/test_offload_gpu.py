"""Parameters and optimizer state on the host of one GPU: the same numbers, and the device's memory is free for the rest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep
from instep.train.reduce.local_part import local_part

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
WIDTH, DEPTH = 1024, 8


def train(offload: bool) -> tuple[list[Tensor], int, set[str]]:
    """The weights, the most bytes that the device held, and where parameters and optimizer state were."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(DEPTH))
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    rows = TensorDataset(torch.randn(16, WIDTH), torch.randn(16, 1))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with instep.Run(global_batch=8, micro_batch=4, parallel="zero3", offload=offload) as run:
        optimizer = torch.optim.AdamW(model.parameters())
        run.prepare(model, optimizer)
        for step in run.steps(run.loader(rows), epochs=2):
            step.forward_backward(model, F.mse_loss)
            step.update()
        held = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
        places = {local_part(tensor).device.type for tensor in held}
        weights = [local_part(p).detach().cpu() for p in model.parameters()]  # one rank's part is all of it
        return weights, torch.cuda.max_memory_allocated() - before, places


def test_the_host_holds_parameters_and_optimizer_state() -> None:
    plain, plain_bytes, plain_places = train(False)
    moved, moved_bytes, moved_places = train(True)
    assert (plain_places, moved_places) == ({"cuda"}, {"cpu"})
    assert moved_bytes < plain_bytes / 2
    for expected, found in zip(plain, moved, strict=True):
        assert torch.allclose(expected, found, rtol=1e-5, atol=1e-6)

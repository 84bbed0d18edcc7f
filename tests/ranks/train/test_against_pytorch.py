"""The same numbers as plain PyTorch: one process on the full batch in float64, and DDP to the bit in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import instep
from run_ranks import run_ranks

STEPS, FEATURES = 6, 40


def rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS * 16, FEATURES, generator=generator, dtype=dtype)
    return x, torch.randint(0, 4, (STEPS * 16,), generator=generator)


def model_of(dtype: torch.dtype, width: int = 32) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, 4)).to(dtype)


def train_with_instep(rank: int, size: int, dtype: torch.dtype, micro_batch: int, width: int, clip: Any) -> Any:
    with instep.Run(global_batch=16, micro_batch=micro_batch, clip_norm=clip) as run:
        model = model_of(dtype, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        run.prepare(model, optimizer)
        losses = []
        for step in run.steps(run.loader(TensorDataset(*rows(dtype)), shuffle=False), epochs=1):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
            losses.append((step.loss, step.grad_norm))
        return losses, [p.detach().clone() for p in model.parameters()]


def train_plainly(dtype: torch.dtype, width: int, clip: float | None) -> Any:
    model, (x, y), losses = model_of(dtype, width), rows(dtype), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for xs, ys in zip(x.split(16), y.split(16)):
        loss = F.cross_entropy(model(xs), ys)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        losses.append((float(loss.detach()), float(norm)))
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("size", "micro_batch", "clip"), [(1, 16, None), (1, 2, 0.5), (2, 4, 0.5), (3, 2, None)])
def test_equals_one_process_in_plain_pytorch(size: int, micro_batch: int, clip: float | None) -> None:
    losses, parameters = train_plainly(torch.float64, 32, clip)
    for found_losses, found in run_ranks(train_with_instep, size, torch.float64, micro_batch, 32, clip):
        assert found_losses == [pytest.approx(pair, rel=1e-10) for pair in losses]
        for here, there in zip(found, parameters):
            torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)


def train_with_ddp(rank: int, size: int, width: int) -> Any:
    model = DistributedDataParallel(model_of(torch.float32, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x, y = rows(torch.float32)
    each = 16 // size
    for xs, ys in zip(x.split(16), y.split(16)):
        mine = slice(rank * each, (rank + 1) * each)
        optimizer.zero_grad()
        F.cross_entropy(model(xs[mine]), ys[mine]).backward()
        optimizer.step()
    dist.barrier()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("width", [32, 30_000])  # one bucket in cache; several buckets, overlapped
def test_equals_ddp_to_the_bit(width: int) -> None:
    expected = run_ranks(train_with_ddp, 2, width)[0]
    for _, found in run_ranks(train_with_instep, 2, torch.float32, 8, width, None):
        for here, there in zip(found, expected):
            assert torch.equal(here, there)

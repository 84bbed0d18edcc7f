"""Recomputation and offload change no bit, in any split; compiled blocks agree to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from run_ranks import run_ranks
from scenarios import CLASSES, FEATURES, adam, even_data, whole


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.norm(self.up(x)))))


def deep() -> nn.Module:
    blocks = [Block(8) for _ in range(3)]
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Sequential(*blocks), nn.Linear(8, CLASSES))


def train(precision: str = "fp32", **options: Any) -> list[Tensor]:
    with instep.Run(global_batch=16, micro_batch=2, precision=precision, **options) as run:
        model = deep()
        run.prepare(model, adam(model))
        losses: list[Any] = []
        for step in run.steps(run.loader(even_data(), shuffle=True), steps=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x.float()), y))
            step.update()
            losses += [step.loss, step.grad_norm]
        return [torch.tensor(losses), *(whole(value).clone() for value in model.state_dict().values())]


OPTIONS: dict[str, dict[str, Any]] = {
    "all blocks": {"recompute": "blocks"},
    "every second": {"recompute": 2},
    "selective": {"recompute": "selective"},
    "in bf16": {"recompute": "blocks", "precision": "bf16"},
    "offload": {"offload": True},
    "offload, all blocks": {"offload": True, "recompute": "blocks"},
}
SPLITS: dict[str, tuple[int, Any]] = {
    "ddp": (2, "ddp"),
    "zero2": (2, "zero2"),
    "2 copies of 2 shards": (4, instep.Parallel(replicate=2, shard=2)),
}


def play(rank: int, size: int, parallel: Any) -> dict[str, list[Tensor]]:
    """Each option, and the same training without it."""
    found: dict[str, list[Tensor]] = {precision: train(precision, parallel=parallel) for precision in ("fp32", "bf16")}
    for name, options in OPTIONS.items():
        if parallel != "ddp" or "offload" not in options:
            found[name] = train(parallel=parallel, **options)
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_no_bit_changes(split: str) -> None:
    size, parallel = SPLITS[split]
    for rank in run_ranks(play, size, parallel):
        for name in OPTIONS.keys() & rank.keys():
            plain = rank[OPTIONS[name].get("precision", "fp32")]
            for expected, found in zip(plain, rank[name], strict=True):
                assert torch.equal(expected, found), name


def play_compiled(rank: int, size: int, parallel: Any) -> tuple[list[Tensor], list[Tensor]]:
    return train_without_dropout(parallel), train_without_dropout(parallel, compile=True, recompute="blocks")


def train_without_dropout(parallel: Any, **options: Any) -> list[Tensor]:
    with instep.Run(global_batch=8, micro_batch=2, parallel=parallel, **options) as run:
        model = deep()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # compiled dropout draws other masks
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(run.loader(even_data()), steps=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x.float()), y))
            step.update()
        return [whole(value).clone() for value in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_compiled_blocks_agree_to_rounding(parallel: str) -> None:
    for plain, compiled in run_ranks(play_compiled, 2, parallel):
        for expected, found in zip(plain, compiled, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

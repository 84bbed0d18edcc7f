"""Recomputation and offload change no bit, in any split; compiled blocks agree to rounding."""

from __future__ import annotations

from collections.abc import Callable
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


class Deep(nn.Module):
    """Blocks with statistics, dropout and a buffer each."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.into(x.float())))


class Layers(nn.Module):
    """Attention and pairs of layers, which the tensor axis splits."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.into = nn.Linear(1, 8)
        layers = [nn.TransformerEncoderLayer(8, 4, 16, dropout, batch_first=True) for _ in range(3)]
        self.layers, self.out = nn.ModuleList(layers), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x.to(self.into.weight.dtype)[..., None])
        for layer in self.layers:
            h = layer(h)
        return self.out(h.mean(1))


def train(model_of: Callable[[], nn.Module], precision: str = "fp32", **options: Any) -> list[Tensor]:
    with instep.Run(global_batch=16, micro_batch=2, precision=precision, **options) as run:
        torch.manual_seed(1)
        model = model_of()
        run.prepare(model, adam(model))
        losses: list[Any] = []
        for step in run.steps(run.loader(even_data(), shuffle=True), steps=2):
            step.forward_backward(model, F.cross_entropy)
            step.update()
            losses += [step.loss, step.grad_norm]
        values = [value for value in model.state_dict().values() if not value.is_meta]
        return [torch.tensor(losses), *(whole(value).clone() for value in values)]


OPTIONS: dict[str, dict[str, Any]] = {
    "all blocks": {"recompute": "blocks"},
    "every second": {"recompute": 2},
    "selective": {"recompute": "selective"},
    "in bf16": {"recompute": "blocks", "precision": "bf16"},
    "offload": {"offload": True},
    "offload, all blocks": {"offload": True, "recompute": "blocks"},
}
P = instep.Parallel
SPLITS: dict[str, tuple[int, Callable[[], nn.Module], Any]] = {
    "ddp": (2, Deep, "ddp"),
    "zero2": (2, Deep, "zero2"),
    "2 copies of 2 shards": (4, Deep, P(replicate=2, shard=2)),
    "2 of each layer": (2, Layers, P(tensor=2)),
    "stretches": (2, Layers, P(tensor=2, sequence=True)),
}
SLOW_SPLITS: dict[str, tuple[int, Callable[[], nn.Module], Any]] = {
    "zero1": (2, Deep, "zero1"),
    "zero3": (2, Layers, "zero3"),
    "2 stages": (2, Layers, P(pipeline=2)),
    "2 stages there and back": (2, Layers, P(pipeline=2, schedule="zbv")),
    "2 copies of 2 of each layer": (4, Layers, P(replicate=2, tensor=2)),
    "2 shards of 2 of each layer": (4, Layers, P(shard=2, tensor=2)),
    "2 shards of stretches": (4, Layers, P(shard=2, tensor=2, sequence=True)),
    "2 stages of 2 of each layer": (4, Layers, P(pipeline=2, tensor=2)),
    "2 stages of 2 shards": (4, Layers, P(pipeline=2, shard=2)),
    "2 copies of 2 shards of 2 of each layer": (8, Layers, P(replicate=2, shard=2, tensor=2)),
    "2 stages of 2 shards of 2 of each layer": (8, Layers, P(pipeline=2, shard=2, tensor=2)),
}


def play(rank: int, size: int, model_of: Callable[[], nn.Module], parallel: Any) -> dict[str, list[Tensor]]:
    """Each option, and the same training without it."""
    plain = {precision: train(model_of, precision, parallel=parallel) for precision in ("fp32", "bf16")}
    is_sharded = parallel in ("zero2", "zero3") or getattr(parallel, "shard", 1) != 1
    chosen = {name: options for name, options in OPTIONS.items() if is_sharded or "offload" not in options}
    if getattr(parallel, "schedule", "") == "zbv":  # takes backward apart
        del chosen["selective"]
    return plain | {name: train(model_of, parallel=parallel, **options) for name, options in chosen.items()}


def check_no_bit_changes(size: int, model_of: Callable[[], nn.Module], parallel: Any) -> None:
    for rank in run_ranks(play, size, model_of, parallel):
        for name in OPTIONS.keys() & rank.keys():
            plain = rank[OPTIONS[name].get("precision", "fp32")]
            for expected, found in zip(plain, rank[name], strict=True):
                assert torch.equal(expected, found), name


@pytest.mark.parametrize("split", SPLITS)
def test_no_bit_changes(split: str) -> None:
    check_no_bit_changes(*SPLITS[split])


@pytest.mark.slow
@pytest.mark.parametrize("split", SLOW_SPLITS)
def test_no_bit_changes_in_rarer_splits(split: str) -> None:
    check_no_bit_changes(*SLOW_SPLITS[split])


def play_compiled(rank: int, size: int, parallel: Any) -> tuple[list[Tensor], list[Tensor]]:
    return train_without_dropout(parallel), train_without_dropout(parallel, compile=True, recompute="blocks")


def train_without_dropout(parallel: Any, **options: Any) -> list[Tensor]:
    with instep.Run(global_batch=8, micro_batch=2, parallel=parallel, **options) as run:
        model = Deep()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # compiled dropout draws other masks
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(run.loader(even_data()), steps=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
        return [whole(value).clone() for value in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_compiled_blocks_agree_to_rounding(parallel: str) -> None:
    for plain, compiled in run_ranks(play_compiled, 2, parallel):
        for expected, found in zip(plain, compiled, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def play_split(rank: int, size: int, parallel: Any, compile: bool) -> tuple[list[Tensor], int]:
    """In float64; and how many graphs were compiled."""
    from torch._dynamo.utils import counters

    with instep.Run(global_batch=8, micro_batch=2, parallel=parallel, compile=compile) as run:
        torch.manual_seed(1)
        model = Layers(dropout=0.0).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(run.loader(even_data()), steps=2):
            step.forward_backward(model, F.cross_entropy)
            step.update()
        assert not counters["graph_break"]
        return [whole(value).clone() for value in model.state_dict().values()], counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_blocks_with_split_layers_have_the_numbers_of_one_process() -> None:
    expected, _ = run_ranks(play_split, 1, "ddp", False)[0]
    for found, graphs in run_ranks(play_split, 2, P(tensor=2), True):
        assert graphs == 1  # for all blocks
        for there, here in zip(expected, found, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-10)

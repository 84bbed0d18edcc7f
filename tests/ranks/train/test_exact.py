"""`exact=True`: the same bits on 1, 2 and 4 ranks, through any loss, precision, optimizer, and a restart in between."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep
from run_ranks import run_ranks
from scenarios import (
    CLASSES,
    FEATURES,
    Branches,
    Noisy,
    Stream,
    Tied,
    contrastive,
    even_data,
    gan,
    mlp,
    policy,
    some_left_out,
    supervised,
    token_mean,
    two_calls,
    two_groups,
    two_towers,
)


def singles() -> TensorDataset:
    x, y = even_data().tensors
    return TensorDataset(x.float(), y)


def net(*middle: nn.Module) -> nn.Module:
    return mlp(*middle).float()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(40, 24), nn.Linear(24, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.table((x.abs() * 7).long().clamp(max=39)).mean(1)))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def plain_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(model_of: Callable[[], nn.Module] = net, loss_of: Any = None, **more: Any) -> dict[str, Any]:
    return supervised(model_of, loss_of, **{"source_of": singles, "exact": True, **more})


TRAININGS: dict[str, Callable[[], dict[str, Any]]] = {
    "adamw, dropout, clipping": lambda: train(lambda: net(nn.Dropout(0.3)), clip_norm=0.1),
    "adamw, not fused": lambda: train(optimizer_of=plain_adam),
    "sgd with momentum": lambda: train(optimizer_of=momentum),
    "batch norm": lambda: train(lambda: net(nn.BatchNorm1d(16))),
    "embedding": lambda: train(Words),
    "bf16": lambda: train(lambda: net(nn.Dropout(0.3)), precision="bf16"),
    "fp16": lambda: train(lambda: net(nn.BatchNorm1d(16)), precision="fp16", clip_norm=0.5),
    "compressed": lambda: train(lambda: net(nn.Dropout(0.3)), compress="bf16"),
    "compressed, several calls": lambda: train(loss_of=two_calls, compress="bf16", micro_batch=1),
    "clipped by value": lambda: train(clip_value=0.01),
    "4 slots": lambda: train(global_batch=16, micro_batch=4),
    "16 slots": lambda: train(global_batch=16, micro_batch=1),
    "token mean": lambda: train(loss_of=token_mean),
    "several calls": lambda: train(loss_of=two_calls),
    "left out": lambda: train(loss_of=some_left_out),
    "unused parameters": lambda: train(lambda: Branches().float(), micro_batch=1),
    "tied and frozen": lambda: train(lambda: Tied().float()),
    "two groups": lambda: train(optimizer_of=two_groups),
    "augmentation": lambda: train(lambda: mlp(), source_of=Noisy),
    "stream": lambda: train(lambda: mlp(), source_of=Stream, loader={"shuffle": None}),
    "wide, in several buckets": lambda: train(
        lambda: nn.Sequential(nn.Linear(FEATURES, 60_000), nn.ReLU(), nn.Linear(60_000, CLASSES)), epochs=1
    ),
    "gan": lambda: gan(exact=True),
    "policy": lambda: policy(exact=True),
    "contrastive": lambda: contrastive(exact=True),
    "contrastive, batch norm": lambda: contrastive(nn.BatchNorm1d(16).double(), exact=True),
    "two towers": lambda: two_towers(exact=True),
}


def play(rank: int, size: int, name: str) -> dict[str, Any]:
    return TRAININGS[name]()


@cache
def alone(name: str) -> dict[str, Any]:
    return run_ranks(play, 1, name)[0]


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert repr(found["history"]) == repr(expected["history"])  # all digits; repr since NaN is not NaN
    for key, value in expected["state"].items():
        assert torch.equal(found["state"][key], value), key


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TRAININGS)
def test_gives_the_bits_of_one_process(name: str, size: int) -> None:
    for rank in run_ranks(play, size, name):
        assert_same_bits(rank, alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRAININGS if name != "4 slots"])
def test_gives_the_bits_of_one_process_on_eight(name: str) -> None:
    for rank in run_ranks(play, 8, name):
        assert_same_bits(rank, alone(name))


def train_partly(rank: int, size: int, folder: str, last: int | None) -> dict[str, Any]:
    with instep.Run(global_batch=16, micro_batch=2, exact=True, precision="fp16", clip_norm=0.5, dir=folder) as run:
        model = net(nn.BatchNorm1d(16), nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
        run.prepare(model, optimizer, scheduler)
        train_set = run.loader(singles(), shuffle=True)
        run.restore()
        history: list[Any] = []
        for step in run.steps(train_set, epochs=3):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
            history.append((step.index, step.loss, step.grad_norm))
            if step.index == last:
                run.save()
                break
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for i, values in enumerate(optimizer.state.values()):
            state.update({f"{i}.{key}": value.clone() for key, value in values.items()})
        return {"history": history, "state": state}


def test_continues_on_another_number_of_ranks_to_the_bit(tmp_path: Path) -> None:
    whole = run_ranks(train_partly, 1, str(tmp_path / "whole"), None)[0]
    history: list[Any] = []
    for size, last in ((2, 3), (1, 8), (4, 9), (2, None)):  # 3, 8 and 9 are in the middle of epochs of 6 steps
        part = run_ranks(train_partly, size, str(tmp_path / "parts"), last)[0]
        history += part["history"]
    assert_same_bits({**part, "history": history}, whole)


def too_many(rank: int, size: int) -> str:
    try:
        with instep.Run(global_batch=16, micro_batch=2, exact=True):
            return ""
    except instep.UsageError as error:
        return str(error)


def test_names_the_numbers_of_ranks_that_fit() -> None:
    text = "exact=True cannot run on 3 ranks: a step has 8 micro-batches, and each rank needs the same power of two of them. "
    assert run_ranks(too_many, 3) == [text + "These numbers of ranks fit: 1, 2, 4, 8."] * 3


def test_refuses_another_micro_batch(tmp_path: Path) -> None:
    def open_run(micro_batch: int) -> instep.Run:
        return instep.Run(global_batch=8, micro_batch=micro_batch, exact=True, dir=tmp_path)

    def prepare(run: instep.Run) -> None:
        model = nn.Linear(2, 2)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with open_run(2) as run:
        prepare(run)
        run.save()
    text = "exact=True cannot continue with micro_batch=4: the checkpoint"
    with pytest.raises(instep.UsageError, match=re.escape(text)), open_run(4) as run:
        prepare(run)
        run.restore()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum()
        return self.layer(x)


def test_refuses_a_buffer_that_forward_writes() -> None:
    with pytest.raises(instep.UsageError, match="exact=True cannot keep the buffer seen: forward writes it"):
        train(Counting)


def test_leaves_the_process_as_it_was() -> None:
    threads = torch.get_num_threads()
    with instep.Run(global_batch=8, exact=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads

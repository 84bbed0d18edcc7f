"""Every schedule of a pipeline against one process with the explicit loop, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import instep
from run_ranks import run_ranks
from scenarios import CLASSES, FEATURES, adam, data, even_data, sgd, step_lr, two_groups, whole

TOLERANCE = 1e-9  # float64, tens of steps


class Block(nn.Module):
    def __init__(self, width: int, drop: float, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(2 * width) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


class Deep(nn.Module):
    """Something before the blocks, an argument that every block gets, and something behind them that may be tied."""

    def __init__(self, drop: float = 0.0, norm: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(10))
        self.into = nn.Linear(FEATURES, 10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(10, drop, norm) for _ in range(4)])
        self.again = nn.Linear(10, 10)
        if tied:
            self.again.weight = self.frozen.weight.requires_grad_()
        self.out = nn.Linear(10, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + x.abs().mean(1, keepdim=True)
        x = self.frozen(self.into(x) + self.shift)
        for block in self.blocks:
            x = block(x, scale)
        return self.out(self.again(x))


def chain() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(FEATURES, 12)]
    for _ in range(4):
        layers += [nn.ReLU(inplace=True), nn.Linear(12, 12)]
    return nn.Sequential(*layers, nn.Linear(12, CLASSES)).double()


def token_mean(out: Tensor, y: Tensor) -> tuple[Tensor, int]:
    mask = y > 0  # some micro-batches have many of these, some few, some none
    return F.cross_entropy(out[mask], y[mask]), int(mask.sum())


def infinite_once(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(out, y)
    return loss * float("inf") if y[0] == 1 and y[-1] == 3 else loss


def train(
    model_of: Callable[[], nn.Module],
    loss_fn: Callable[..., Any] = F.cross_entropy,
    optimizer_of: Callable[..., torch.optim.Optimizer] = adam,
    source_of: Callable[[], Any] = data,
    scheduler_of: Callable[..., Any] | None = None,
    explicit: bool = False,
    evaluate: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    with instep.Run(**{"global_batch": 16, "micro_batch": 2, **arguments}) as run:
        model = model_of()
        optimizer = optimizer_of(model)
        scheduler = scheduler_of(optimizer) if scheduler_of else None
        run.prepare(model, optimizer, scheduler)
        loader, test = run.loader(source_of(), shuffle=True), run.loader(data(21))
        history: list[Any] = []
        for step in run.steps(loader, epochs=2):
            if explicit:
                for x, y in step:
                    found = loss_fn(model(x), y)
                    step.backward(*found) if isinstance(found, tuple) else step.backward(found)
            else:
                step.forward_backward(model, loss_fn)
            step.update()
            history.append((step.index, step.loss, step.grad_norm, step.skipped))
            if evaluate and step.ends_epoch:
                values = [(float(F.cross_entropy(model(x), y)), len(y)) for x, y in run.evaluate(test)]
                history.append((run.mean([v for v, _ in values], [n for _, n in values]), run.sum(len(values))))
        state = {k: whole(v).detach().clone() for k, v in model.state_dict().items() if not v.is_meta}
        return {"history": history, "state": state}


TRAININGS: dict[str, Callable[..., dict[str, Any]]] = {
    "adamw, dropout": lambda **split: train(lambda: Deep(0.3), clip_norm=0.1, **split),
    "sgd, by value, a chain": lambda **split: train(chain, optimizer_of=sgd, clip_value=0.01, **split),
    "token mean": lambda **split: train(Deep, token_mean, **split),
    "batch norm": lambda **split: train(
        lambda: Deep(norm=True), optimizer_of=sgd, source_of=even_data, micro_batch=4, **split
    ),
    "tied over stages": lambda **split: train(lambda: Deep(tied=True), clip_norm=0.1, **split),
    "groups and schedule": lambda **split: train(Deep, optimizer_of=two_groups, scheduler_of=step_lr, **split),
    "not finite": lambda **split: train(Deep, infinite_once, **split),
    "evaluated": lambda **split: train(Deep, evaluate=True, **split),
}
SPLITS: dict[str, tuple[int, Any]] = {
    "2 stages": (2, instep.Parallel(pipeline=2)),
    "2 stages, zbv, 2 copies": (4, instep.Parallel(pipeline=2, schedule="zbv", replicate=2)),
}
SCHEDULES: dict[str, tuple[int, Any]] = {
    "gpipe": (3, instep.Parallel(pipeline=3, schedule="gpipe")),
    "interleaved": (2, instep.Parallel(pipeline=2, schedule="interleaved_1f1b")),
    "interleaved, cut by hand": (
        2,
        instep.Parallel(pipeline=2, schedule="interleaved_1f1b", cut=["blocks.0", "blocks.1", "blocks.3"]),
    ),
    "interleaved zero-bubble": (2, instep.Parallel(pipeline=2, schedule="interleaved_zero_bubble")),
    "dualpipev": (2, instep.Parallel(pipeline=2, schedule="dualpipev")),
    "2 copies": (4, instep.Parallel(pipeline=2, replicate=2)),
}
SHARDED: dict[str, tuple[int, Any]] = {
    "2 shards": (4, instep.Parallel(pipeline=2, shard=2)),
    "2 copies of 2 shards": (8, instep.Parallel(pipeline=2, replicate=2, shard=2)),
    "2 shards, interleaved zero-bubble": (4, instep.Parallel(pipeline=2, shard=2, schedule="interleaved_zero_bubble")),
    "2 shards, zbv": (4, instep.Parallel(pipeline=2, shard=2, schedule="zbv")),
    "2 shards, dualpipev": (4, instep.Parallel(pipeline=2, shard=2, schedule="dualpipev")),
}


def play(rank: int, size: int, name: str, parallel: Any, explicit: bool = False) -> dict[str, Any]:
    return TRAININGS[name](parallel=parallel, explicit=explicit)


@cache
def alone(name: str) -> dict[str, Any]:
    return run_ranks(play, 1, name, "ddp", True)[0]


def check_equal(expected: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for there, here in zip(expected["history"], rank["history"], strict=True):
            assert here == pytest.approx(there, rel=TOLERANCE, nan_ok=True)
        for key, value in rank["state"].items():
            torch.testing.assert_close(value, expected["state"][key], rtol=TOLERANCE, atol=TOLERANCE, msg=key)
    assert set().union(*(rank["state"] for rank in ranks)) == set(expected["state"])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", TRAININGS)
def test_trains_as_one_process_does(name: str, split: str) -> None:
    size, parallel = SPLITS[split]
    check_equal(alone(name), run_ranks(play, size, name, parallel))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_numbers(schedule: str) -> None:
    size, parallel = SCHEDULES[schedule]
    check_equal(alone("adamw, dropout"), run_ranks(play, size, "adamw, dropout", parallel))


@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_forward_backward_is_the_explicit_loop_in_every_other_split(parallel: str) -> None:
    check_equal_parts(alone("token mean"), run_ranks(play_whole, 2, "token mean", parallel))


def play_whole(rank: int, size: int, name: str, parallel: Any) -> list[Any]:
    return TRAININGS[name](parallel=parallel)["history"]


def check_equal_parts(expected: dict[str, Any], histories: list[list[Any]]) -> None:
    for history in histories:
        for there, here in zip(expected["history"], history, strict=True):
            assert here == pytest.approx(there, rel=TOLERANCE)


def play_sharded(rank: int, size: int, parallel: Any, tied: bool) -> dict[str, Any]:
    return train(lambda: Loose(tied=tied), clip_norm=0.1, evaluate=True, explicit=size == 1, parallel=parallel)


class Loose(Deep):
    """Without a parameter of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.shift
        self.shift = 0.0


@pytest.mark.parametrize("split", SHARDED)
def test_a_stage_may_be_sharded(split: str) -> None:
    size, parallel = SHARDED[split]
    tied = parallel.schedule == "1f1b"
    check_equal(run_ranks(play_sharded, 1, "ddp", tied)[0], run_ranks(play_sharded, size, parallel, tied))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        padding = x > 1.2
        padding[:, 0] = False
        rows = self.encoder(self.into(x[..., None]), src_key_padding_mask=padding)
        return self.out(rows.masked_fill(padding[..., None], 0).mean(1))  # PyTorch's fast path has zeros there, too


def play_encoder(rank: int, size: int, parallel: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return train(Encoder, clip_norm=0.1, evaluate=True, explicit=size == 1, parallel=parallel)


TENSOR: dict[str, tuple[int, Any]] = {
    "tensor": (4, instep.Parallel(pipeline=2, tensor=2)),
    "tensor, 2 shards": (8, instep.Parallel(pipeline=2, tensor=2, shard=2)),
    "zero1": (4, instep.Parallel(pipeline=2, replicate=2, share_optimizer=True)),
}


@pytest.mark.parametrize("split", TENSOR)
def test_layers_of_a_stage_may_be_split(split: str) -> None:
    size, parallel = TENSOR[split]
    check_equal(run_ranks(play_encoder, 1, "ddp")[0], run_ranks(play_encoder, size, parallel))


def train_partly(rank: int, size: int, folder: str, parallel: Any, last: int) -> dict[str, Any]:
    with instep.Run(global_batch=16, micro_batch=2, parallel=parallel, dir=folder) as run:
        model = Deep(0.3, tied=True)
        optimizer = adam(model)
        run.prepare(model, optimizer)
        run.restore()
        for step in run.steps(run.loader(data(), shuffle=True), epochs=2):
            step.forward_backward(model, F.cross_entropy)
            step.update()
            if step.index == last:
                run.save()
                break
        run.export(f"{folder}/weights.safetensors")
        return {}


def test_continues_in_another_split(tmp_path: Path) -> None:
    run_ranks(train_partly, 1, str(tmp_path / "one"), "ddp", 9)
    for size, parallel, last in (
        (2, instep.Parallel(pipeline=2), 2),
        (2, "zero3", 4),
        (4, instep.Parallel(pipeline=2, replicate=2, schedule="zbv"), 6),
        (1, "ddp", 7),
        (3, instep.Parallel(pipeline=3, schedule="gpipe"), 9),
    ):
        run_ranks(train_partly, size, str(tmp_path / "parts"), parallel, last)
    expected, weights = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "parts"))
    assert expected.keys() == weights.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=TOLERANCE, atol=TOLERANCE)

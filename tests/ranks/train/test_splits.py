"""Every split against one process, in float64: one table of trainings times splits."""

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
from scenarios import (
    CLASSES,
    FEATURES,
    adam,
    data,
    even_data,
    sgd,
    some_left_out,
    step_lr,
    supervised,
    token_mean,
    two_groups,
    whole,
)

TOLERANCE = 1e-8  # float64, tens of steps; batch norm over two samples magnifies the order of sums


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Deep(nn.Module):
    """Blocks to shard one by one, tied ends, a frozen layer, batch norm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, 10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(10) for _ in range(3)])
        self.norm = nn.BatchNorm1d(10) if norm else nn.Identity()
        self.again = nn.Linear(10, 10)
        self.again.weight = self.frozen.weight if norm else self.again.weight
        self.out = nn.Linear(10, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.into(x))
        for block in self.blocks:
            x = block(x)
        return self.out(self.again(self.norm(x)))


def left_out_later(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    if step.index:  # a rank needs an input before it can take a turn without one
        some_left_out(step, model, x, y)
    else:
        step.backward(F.cross_entropy(model(x), y))


def infinite_once(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    step.backward(loss * float("inf") if step.index == 3 and y[0] == 1 else loss)


def evaluated(**arguments: Any) -> dict[str, Any]:
    """Evaluates between epochs, with fewer samples than would fill every rank's turns."""
    with instep.Run(global_batch=16, micro_batch=2, **arguments) as run:
        model = Deep()
        run.prepare(model, adam(model))
        train, test = run.loader(data(), shuffle=True), run.loader(data(21))
        history: list[Any] = []
        for step in run.steps(train, epochs=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
            if step.ends_epoch:
                values = [(float(F.cross_entropy(model(x), y)), len(y)) for x, y in run.evaluate(test)]
                history.append(
                    (step.index, run.mean([v for v, _ in values], [n for _, n in values]), run.sum(len(values)))
                )
        state = {key: whole(value).detach().clone() for key, value in model.state_dict().items()}
        return {"history": history, "state": state}


TRAININGS: dict[str, Callable[..., dict[str, Any]]] = {
    "adamw": lambda **split: supervised(Deep, clip_norm=0.1, **split),
    "sgd, by value": lambda **split: supervised(Deep, None, sgd, clip_value=0.01, **split),
    "batch norm, tied": lambda **split: supervised(lambda: Deep(True), None, sgd, source_of=even_data, **split),
    "token mean": lambda **split: supervised(Deep, token_mean, **split),
    "left out": lambda **split: supervised(Deep, left_out_later, **split),
    "groups and schedule": lambda **split: supervised(Deep, None, two_groups, step_lr, **split),
    "not finite": lambda **split: supervised(Deep, infinite_once, **split),
    "evaluated": evaluated,
}
SPLITS: dict[str, tuple[int, Any]] = {
    "zero3 on 2": (2, "zero3"),
    "zero2 on 3": (3, "zero2"),
    "2 copies of 2 shards": (4, instep.Parallel(replicate=2, shard=None)),
    "zero1 on 3": (3, "zero1"),
    "2 of each layer": (2, instep.Parallel(tensor=2)),
    "2 shards of 2 of each layer": (4, instep.Parallel(shard=2, tensor=2)),
}
FEW = {  # where the others say what these would
    "zero1 on 3": ("adamw", "groups and schedule", "left out"),
    "2 of each layer": ("sgd, by value", "batch norm, tied", "evaluated"),
    "2 shards of 2 of each layer": ("adamw", "batch norm, tied", "not finite", "token mean"),
}


def play(rank: int, size: int, name: str, parallel: Any) -> dict[str, Any]:
    return TRAININGS[name](parallel=parallel)


@cache
def alone(name: str) -> dict[str, Any]:
    return run_ranks(play, 1, name, "ddp")[0]


@pytest.mark.parametrize(
    ("name", "split"), [(name, split) for split in SPLITS for name in TRAININGS if name in FEW.get(split, TRAININGS)]
)
def test_trains_as_one_process_does(name: str, split: str) -> None:
    check_split(name, *SPLITS[split])


def check_split(name: str, size: int, parallel: Any) -> None:
    expected = alone(name)
    for rank in run_ranks(play, size, name, parallel):
        for there, here in zip(expected["history"], rank["history"], strict=True):
            assert here == pytest.approx(there, rel=TOLERANCE, nan_ok=True)
        for key, value in expected["state"].items():
            torch.testing.assert_close(rank["state"][key], value, rtol=TOLERANCE, atol=TOLERANCE, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "sgd, by value", "batch norm, tied"])
def test_three_axes_train_as_one_process_does(name: str) -> None:
    check_split(name, 8, instep.Parallel(replicate=2, shard=2, tensor=2))


def shared_out(rank: int, size: int, parallel: Any) -> dict[str, Any]:
    """With an optimizer that looks at whole matrices."""
    with instep.Run(global_batch=16, micro_batch=2, parallel=parallel, exact=True) as run:
        model = Deep()
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        for step in run.steps(run.loader(data(), shuffle=True), steps=4):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
        return {
            "state": {key: value.clone() for key, value in model.state_dict().items()},
            "kept": len(optimizer.state),
        }


def test_zero1_keeps_the_bits_and_a_share_of_the_state() -> None:
    alone = run_ranks(shared_out, 1, "ddp")[0]
    ranks = run_ranks(shared_out, 2, "zero1")
    for rank in ranks:
        assert all(torch.equal(rank["state"][key], value) for key, value in alone["state"].items())
        assert 0 < rank["kept"] < alone["kept"]
    assert sum(rank["kept"] for rank in ranks) == alone["kept"]


def train_partly(rank: int, size: int, folder: str, parallel: Any, precision: str, last: int) -> dict[str, Any]:
    with instep.Run(global_batch=16, micro_batch=2, parallel=parallel, precision=precision, dir=folder) as run:
        model = Deep().float() if precision != "fp32" else Deep()
        optimizer = adam(model)
        run.prepare(model, optimizer)
        run.restore()
        for step in run.steps(run.loader(data(), shuffle=True), epochs=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x.to(model.out.weight.dtype)), y))
            step.update()
            if step.index == last:
                run.save()
                break
        run.export(f"{folder}/weights.safetensors")
        moments = {f"{i}": whole(s["exp_avg"]).clone() for i, s in enumerate(optimizer.state.values())}
        return {"sharded": type(model.out.weight).__name__ == "Parameter", "moments": moments}


@pytest.mark.parametrize(
    ("precision", "tolerance", "every"),
    [("fp32", 1e-10, 1), ("bf16", 5e-3, 2)],  # bf16: a step of 1e-2 per update, on sums that round differently
)
def test_continues_in_another_split(tmp_path: Path, precision: str, tolerance: float, every: int) -> None:
    whole_run = run_ranks(train_partly, 1, str(tmp_path / "one"), "ddp", precision, 9)[0]
    splits = [
        (2, "zero3", 1),
        (2, instep.Parallel(tensor=2), 2),
        (3, "zero1", 3),
        (4, instep.Parallel(shard=2, tensor=2), 5),
        (4, instep.Parallel(shard=2, replicate=2), 7),
        (2, instep.Parallel(replicate=2, share_optimizer=True), 8),
        (2, instep.Parallel(tensor=2), 9),
    ]
    for size, parallel, last in splits[::every]:
        found = run_ranks(train_partly, size, str(tmp_path / "parts"), parallel, precision, last)
    expected, weights = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "parts"))
    assert expected.keys() == weights.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=tolerance, atol=tolerance)
    for key, value in whole_run["moments"].items():
        torch.testing.assert_close(found[0]["moments"][key], value, rtol=tolerance, atol=tolerance)

"""Weights that are read past their layer: right, or refused with the parameter's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from run_ranks import run_ranks
from scenarios import CLASSES, FEATURES, data, sgd


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """reads: the name of a layer whose weight forward uses once more."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.into, self.middle, self.out = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reads = reads
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        x = self.middle(x)
        if self.reads == "middle":
            x = F.linear(x, self.middle.weight)
        if self.reads == "block":
            other: Any = self.blocks[1]
            x = x + F.linear(x, other.up.weight).sum()
        return self.out(x)


def no_penalty(model: nn.Module) -> Any:
    return 0.0


def of_all(model: nn.Module) -> Any:
    return sum(p.square().sum() for p in model.parameters())


def of_whole(model: Net) -> Any:
    """By someone who knows DTensor."""
    weight: Any = model.blocks[0].get_submodule("up").weight
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).square().sum()


def train(
    parallel: Any, reads: str = "", penalty: Callable[[Any], Any] = no_penalty, first: bool = False, decay: float = 0.0
) -> Any:
    """first: the penalty is computed before the model's output; decay: of an L1 penalty on reduced gradients."""
    torch.manual_seed(1)
    history: list[float | None] = []
    try:
        with instep.Run(global_batch=16, micro_batch=4, parallel=parallel) as run:
            model = Net(reads)
            run.prepare(model, sgd(model))
            for step in run.steps(run.loader(data(32)), epochs=1):
                for x, y in step:
                    before = penalty(model) if first else 0.0
                    loss = F.cross_entropy(model(x), y) + 0.1 * (before if first else penalty(model))
                    step.backward(loss)
                step.reduce()
                for parameter in model.parameters():
                    if decay and parameter.grad is not None:
                        parameter.grad.add_(decay * parameter.detach().sign())
                step.update()
                history.append(step.loss)
    except instep.UsageError as error:
        return str(error)
    return history


CASES: dict[str, dict[str, Any]] = {
    "a weight tied by hand": {"reads": "middle"},
    "a weight of a block": {"reads": "block"},
    "a penalty": {"penalty": of_all},
    "a penalty before": {"penalty": of_all, "first": True},
    "a penalty on the whole": {"penalty": of_whole},
    "a penalty on gradients": {"decay": 0.05},
}


def play(rank: int, size: int, splits: list[Any]) -> dict[Any, dict[str, Any]]:
    return {
        parallel if isinstance(parallel, str) else parallel.describe(): {
            name: train(parallel, **case) for name, case in CASES.items()
        }
        for parallel in splits
    }


PENALTY = "A penalty on weights is the optimizer's weight_decay, or is added to param.grad between step.reduce() and step.update()."
SHARED = f"where each rank has only its share of it. Compute with it inside that forward, or train with 'ddp' or 'zero1'. {PENALTY}"


def test_a_read_is_right_or_names_the_parameter() -> None:
    one = run_ranks(play, 1, ["ddp"])[0]["ddp"]
    found = run_ranks(play, 2, ["zero2", "zero3", instep.Parallel(tensor=2)])[0]
    refused = {(split, name) for split, cases in found.items() for name, told in cases.items() if isinstance(told, str)}
    assert refused == {
        ("zero2", "a penalty before"),
        *(
            ("zero3", name)
            for name in ("a weight of a block", "a penalty", "a penalty before", "a penalty on the whole")
        ),
        *(
            ("tensor=2", name)
            for name in ("a weight tied by hand", "a weight of a block", "a penalty", "a penalty before")
        ),
    }
    for split, cases in found.items():
        for name, told in cases.items():
            if (split, name) not in refused:
                assert told == pytest.approx(one[name], rel=1e-9), (split, name)
    assert "test_read_outside.py" in found["zero3"]["a weight of a block"]
    assert found["zero3"]["a weight of a block"].startswith(
        "blocks.1.up.weight is read outside the forward of blocks.1.up at "
    )
    assert found["zero3"]["a penalty on the whole"].startswith(
        "blocks.0.up.weight is read outside the forward of blocks.0.up by the loss that comes to test_read_outside.py:"
    )
    assert found["zero2"]["a penalty before"].endswith(f"(step.backward(loss)), {SHARED}")
    told = found["tensor=2"]["a weight tied by hand"]
    assert told.startswith("middle.weight is read past the forward of middle at test_read_outside.py:")
    assert told.endswith(
        "(x = F.linear(x, self.middle.weight)), and each of 2 ranks holds a part of it. Call the layer, or keep it whole: "
        f"Parallel(tensor=..., plan={{'middle': 'whole'}}). {PENALTY}"
    )


def train_in_stages(rank: int, size: int, parallel: Any) -> dict[str, Any]:
    """What was said or learned: weights averaged by hand, gradients clipped by hand, L1 on gradients."""
    return {how: _train_in_stages(parallel, how) for how in ("average", "clip", "decay")}


def _train_in_stages(parallel: Any, how: str) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 8), Block(), Block(), nn.Linear(8, CLASSES)).double()
    kept = [p.detach().clone() for p in model.parameters()]
    try:
        with instep.Run(global_batch=16, micro_batch=4, parallel=parallel) as run:
            run.prepare(model, sgd(model))
            for step in run.steps(run.loader(data(32)), epochs=1):
                step.forward_backward(model, F.cross_entropy)
                step.reduce()
                for parameter in model.parameters():
                    if how == "decay" and parameter.grad is not None:
                        parameter.grad.add_(0.05 * parameter.detach().sign())
                if how == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                step.update()
            if how == "average":
                for average, parameter in zip(kept, model.parameters()):
                    average.mul_(0.9).add_(parameter.detach(), alpha=0.1)
    except instep.UsageError as error:
        return str(error)
    return step.loss


def test_in_a_pipeline_it_says_who_holds_the_parameter() -> None:
    one = train_in_stages(0, 1, "ddp")
    first, last = run_ranks(train_in_stages, 2, instep.Parallel(pipeline=2))
    assert first["decay"] == last["decay"] == pytest.approx(one["decay"], rel=1e-9)
    for how, name in {"average": "weight", "clip": "weight.grad"}.items():
        assert last[how].startswith(f"0.{name} is read at test_read_outside.py:")
        assert ", and rank 0 holds it: rank 1 has other parts of the pipeline." in last[how]
        assert ", and rank 1 holds it: rank 0 has other parts of the pipeline." in first[how]
    assert all(isinstance(one[how], float) for how in one)

"""How `step.forward_backward` takes a micro-batch apart, and that it is the explicit loop."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep
from instep.train.forward_backward import read_loss, take_apart


class Named(nn.Module):
    def forward(self, tokens: Any, mask: Any = None) -> Any:
        return tokens


class AnyName(nn.Module):
    def forward(self, **inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (Named(), (1, 2), ((1,), {}, 2)),
        (Named(), [(1, 5), 2], ((1, 5), {}, 2)),
        (Named(), ({"tokens": 1, "mask": 5}, 2), ((), {"tokens": 1, "mask": 5}, 2)),
        (Named(), {"tokens": 1, "labels": 2}, ((), {"tokens": 1}, {"tokens": 1, "labels": 2})),
        (AnyName(), {"tokens": 1, "labels": 2}, ((), {"tokens": 1, "labels": 2}, {"tokens": 1, "labels": 2})),
        (Named(), 7, ((7,), {}, 7)),
    ],
)
def test_a_micro_batch_is_taken_apart_by_one_rule(model: nn.Module, batch: Any, expected: Any) -> None:
    assert take_apart(model, batch) == expected


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            (1, 2, 3),
            "step.forward_backward got a micro-batch of 3 parts; it takes a pair (inputs, targets), a mapping, or one",
        ),
        (
            {"labels": 2},
            "step.forward_backward got a micro-batch with the keys 'labels', none of which the model's forward",
        ),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        take_apart(Named(), batch)


def test_a_loss_may_come_with_its_weight() -> None:
    loss = torch.zeros(())
    assert read_loss(loss) == (loss, None)
    assert read_loss((loss, 3)) == (loss, 3)
    with pytest.raises(
        instep.UsageError, match=r"^step.forward_backward: loss_fn returned a dict; it has to return the loss"
    ):
        read_loss({})
    with pytest.raises(
        instep.UsageError, match=r"^step.forward_backward: loss_fn returned None; it has to return the loss"
    ):
        read_loss(None)


def losses(explicit: bool) -> list[Any]:
    def loss_fn(out: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(out, y), len(y) + int(y[0] > 0)

    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(13, 3), torch.randn(13, 1))
    with instep.Run(global_batch=8, micro_batch=2) as run:
        model = nn.Linear(3, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for step in run.steps(run.loader(rows), epochs=2):
            if explicit:
                for x, y in step:
                    step.backward(*loss_fn(model(x), y))
            else:
                step.forward_backward(model, loss_fn)
            step.update()
            found.append((step.loss, step.grad_norm))
        return found


def test_gives_the_numbers_of_the_explicit_loop() -> None:
    assert losses(True) == losses(False)


@pytest.mark.parametrize(
    ("model", "loss_fn", "text"),
    [
        (
            None,
            F.mse_loss,
            "step.forward_backward got None as its model; it takes the model that run.prepare was given.",
        ),
        (
            nn.Linear(3, 1),
            0.5,
            "step.forward_backward got 0.5 as its loss_fn; it takes a function of the model's output",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(model: Any, loss_fn: Any, text: str) -> None:
    with instep.Run(global_batch=8, micro_batch=2) as run:
        known = nn.Linear(3, 1)
        run.prepare(known, torch.optim.SGD(known.parameters(), lr=0.1))
        loader = run.loader(TensorDataset(torch.randn(8, 3), torch.randn(8, 1)))
        with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
            next(iter(run.steps(loader, epochs=1))).forward_backward(model, loss_fn)

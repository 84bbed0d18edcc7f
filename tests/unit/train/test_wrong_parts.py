"""Parts that do not belong together, and calls that are left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import instep


def optimizer_of_another_model(run: instep.Run) -> None:
    run.prepare(nn.Linear(3, 1), SGD(nn.Linear(3, 1).parameters(), lr=0.1))


def scheduler_of_another_optimizer(run: instep.Run) -> None:
    model = nn.Linear(3, 1)
    other = SGD(model.parameters(), lr=0.1)
    run.prepare(model, SGD(model.parameters(), lr=0.1), StepLR(other, 1))


def number_as_scheduler(run: instep.Run) -> None:
    model = nn.Linear(3, 1)
    run.prepare(model, SGD(model.parameters(), lr=0.1), 3)


def rows_of_a_tensor(run: instep.Run) -> None:
    model = nn.Linear(3, 1)
    run.prepare(model, SGD(model.parameters(), lr=0.1))
    for step in run.steps(run.loader(TensorDataset(torch.randn(8, 3))), epochs=1):
        step.all_rows(torch.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (optimizer_of_another_model, "run.prepare got an optimizer that holds no parameter of its model, a Linear"),
        (scheduler_of_another_optimizer, "run.prepare got a StepLR of another optimizer"),
        (number_as_scheduler, "run.prepare got 3 as its scheduler"),
        (
            rows_of_a_tensor,
            "step.all_rows got a Tensor of shape (3,) and type float32; it takes a function of a micro-batch",
        ),
    ],
)
def test_says_what_does_not_fit(mistake: Callable[[instep.Run], None], text: str) -> None:
    with instep.Run(global_batch=4) as run, pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        mistake(run)


def test_a_frozen_model_may_go_with_a_learned_prompt() -> None:
    with instep.Run(global_batch=4) as run:
        run.prepare(nn.Linear(3, 1).requires_grad_(False), SGD([nn.Parameter(torch.zeros(3))], lr=0.1))


def test_an_optimizer_may_reach_into_an_earlier_model() -> None:
    with instep.Run(global_batch=4) as run:
        first, second = nn.Linear(3, 3), nn.Linear(3, 1)
        run.prepare(first)
        run.prepare(second, SGD([*first.parameters(), *second.parameters()], lr=0.1))


def test_a_forgotten_update_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with instep.Run(global_batch=4) as run:
        model = nn.Linear(3, 1)
        run.prepare(model, SGD(model.parameters(), lr=0.1))
        for step in run.steps(run.loader(TensorDataset(torch.randn(8, 3))), epochs=1):
            for (inputs,) in step:
                step.backward(model(inputs).mean())
    assert capsys.readouterr().err.count("a step had step.backward but no step.update") == 1


def test_a_text_file_is_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_text("root:x:0:0:root:/root:/bin/bash\n", encoding="utf-8")
    with instep.Run(global_batch=4) as run:
        run.prepare(nn.Linear(3, 1))
        with pytest.raises(instep.CheckpointError, match=re.escape("is not a whole torch.save file")):
            run.load_weights(path)

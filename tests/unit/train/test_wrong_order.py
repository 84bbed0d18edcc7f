"""Calls in the wrong order or place, and steps that come to nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import instep
from instep.train.skips import MANY, Skips


class Parts:
    def __init__(self, run: instep.Run, width: int = 3) -> None:
        self.run = run
        self.model = nn.Linear(width, 1)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        run.prepare(self.model, self.optimizer)
        self.loader = run.loader(TensorDataset(torch.randn(16, width)))


def update_twice(parts: Parts) -> None:
    for step in parts.run.steps(parts.loader, epochs=1):
        for (inputs,) in step:
            step.backward(parts.model(inputs).mean())
        step.update()
        step.update()


def update_per_micro_batch(parts: Parts) -> None:
    for step in parts.run.steps(parts.loader, epochs=1):
        for (inputs,) in step:
            step.backward(parts.model(inputs).mean())
            step.update()


def update_after_the_loop(parts: Parts) -> None:
    step = None
    for step in parts.run.steps(parts.loader, epochs=1):
        for (inputs,) in step:
            step.backward(parts.model(inputs).mean())
    assert step is not None
    step.update()


def zero_grad_before_each_backward(parts: Parts) -> None:
    for step in parts.run.steps(parts.loader, epochs=1):
        for (inputs,) in step:
            parts.optimizer.zero_grad()
            step.backward(parts.model(inputs).mean())
        step.update()


def zero_grad_before_update(parts: Parts) -> None:
    for step in parts.run.steps(parts.loader, epochs=1):
        for (inputs,) in step:
            step.backward(parts.model(inputs).mean())
        parts.optimizer.zero_grad(set_to_none=False)
        step.update()


def zero_grad_of_the_model(parts: Parts) -> None:
    for step in parts.run.steps(parts.loader, epochs=1):
        for (inputs,) in step:
            parts.model.zero_grad()
            step.backward(parts.model(inputs).mean())
        step.update()


def loss_of_a_copy(parts: Parts) -> None:
    other = copy.deepcopy(parts.model)
    for step in parts.run.steps(parts.loader, epochs=1):
        for (inputs,) in step:
            step.backward(other(inputs).mean())
        step.update()


def model_twice(parts: Parts) -> None:
    parts.run.prepare(parts.model)


def optimizer_twice(parts: Parts) -> None:
    parts.run.prepare(parts.model, parts.optimizer)


def two_optimizers_for_one_parameter(parts: Parts) -> None:
    parts.run.prepare(parts.model, Adam(parts.model.parameters()))


def nothing_to_schedule(parts: Parts) -> None:
    parts.run.schedule(1.0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("width", [3, 70_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (update_twice, "step.update() of step 0 came a second time without a step.backward in between."),
        (update_per_micro_batch, "step.update() of step 0 was called inside the loop over the step's micro-batches"),
        (update_after_the_loop, "step.update() came when step 3 had ended already, so its gradients are gone."),
        (zero_grad_before_each_backward, f"zero_grad() at {__file__}:"),
        (zero_grad_before_update, f"zero_grad() at {__file__}:"),
        (loss_of_a_copy, "no parameter of SGD got a gradient in step 0: the loss does not come from the model"),
        (model_twice, "run.prepare got the same Linear a second time. Prepare each model once, with its optimizer."),
        (optimizer_twice, "run.prepare got the same SGD a second time."),
        (
            two_optimizers_for_one_parameter,
            "run.prepare got a Adam for weight, which the SGD prepared before trains already.",
        ),
        (nothing_to_schedule, "run.schedule has nothing to step: give run.prepare(model, optimizer, scheduler)"),
    ],
)
def test_says_what_is_wrong(mistake: Callable[[Parts], None], text: str, width: int, exact: bool) -> None:
    with (
        pytest.raises(instep.UsageError, match="^" + re.escape(text)),
        instep.Run(global_batch=4, micro_batch=2, exact=exact) as run,
    ):
        mistake(Parts(run, width))


@pytest.mark.parametrize("width", [3, 70_000], ids=["small", "large"])
def test_gradients_cleared_by_the_model_are_missed(width: int) -> None:
    with (
        pytest.raises(instep.UsageError, match=re.escape("zero_grad() from the script (as by model.zero_grad())")),
        instep.Run(global_batch=4, micro_batch=2) as run,
    ):
        zero_grad_of_the_model(Parts(run, width))


def test_zero_grad_between_steps_does_no_harm() -> None:
    with instep.Run(global_batch=4, micro_batch=2) as run:
        parts = Parts(run)
        for step in run.steps(parts.loader, epochs=2):
            parts.optimizer.zero_grad()
            for (inputs,) in step:
                step.backward(parts.model(inputs).mean())
            step.update()
            parts.optimizer.zero_grad()
            assert step.loss is not None
    assert "zero_grad" not in vars(parts.optimizer)  # the run left the object as it was


def test_two_optimizers_may_share_a_model() -> None:
    with instep.Run(global_batch=4, micro_batch=2, seed=1) as run:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Linear(2, 1))
        before = copy.deepcopy(model.state_dict())
        first, last = SGD(model[1].parameters(), lr=0.1), Adam(model[2].parameters(), lr=0.1)
        run.prepare(model, first)
        run.prepare(model, last)
        for step in run.steps(run.loader(TensorDataset(torch.randn(8, 3))), epochs=1):
            for (inputs,) in step:
                step.backward(model(inputs).square().mean())
            step.update()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"1.weight", "2.weight", "2.bias"} <= changed


def train_on(values: torch.Tensor, **arguments: object) -> nn.Module:
    with instep.Run(**{"global_batch": 2, "micro_batch": 1, **arguments}) as run:  # type: ignore[arg-type]
        model = nn.Linear(1, 1)
        run.prepare(model, SGD(model.parameters(), lr=0.1))
        for step in run.steps(run.loader(TensorDataset(values)), epochs=1):
            for (inputs,) in step:
                step.backward(model(inputs).mean())
            step.update()
    return model


def test_skipped_steps_are_said_ever_more_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    train_on(torch.full((90, 1), float("nan")))
    lines = [line for line in capsys.readouterr().err.splitlines() if re.match("instep: .*skipped", line)]
    assert [re.sub(r"\D*(\d+).*", r"\1", line.removeprefix("instep: ")) for line in lines] == [
        "0",
        "1",
        "3",
        "9",
        "20",
        "40",
    ]
    assert lines[0] == "instep: step 0 skipped on all ranks: its gradients are not finite (loss nan)"
    assert lines[1].endswith("(loss nan); 2 steps so far")
    assert (
        f"{MANY} steps in a row were skipped, the last of them step {MANY - 1}: its gradients are not finite"
        in lines[4]
    )
    assert "Nothing is being learned. Look for inputs and targets that are not finite" in lines[4]


def test_parameters_that_are_broken_end_the_run() -> None:
    with pytest.raises(instep.InstepError) as caught, instep.Run(global_batch=2) as run:
        model = nn.Linear(1, 1)
        run.prepare(model, SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            model.bias.fill_(float("inf"))
        for step in run.steps(run.loader(TensorDataset(torch.ones(200, 1))), epochs=1):
            for (inputs,) in step:
                step.backward(model(inputs).square().mean())
            step.update()
    assert str(caught.value).startswith("training has diverged: bias holds numbers that are not finite")


def test_the_search_for_a_loss_scale_is_no_fault() -> None:
    said: list[str] = []
    skips = Skips(said.append, in_fp16=True)
    assert not any(skips.note_skipped(step, "gradients overflowed in fp16; loss scale 2 -> 1") for step in range(24))
    assert not [text for text in said if "in a row" in text]


def test_an_overflow_counts_for_the_optimizer_that_had_it() -> None:
    with instep.Run(global_batch=2, precision="fp16") as run:
        models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        first, second = [run.prepare(model, SGD(model.parameters(), lr=0.1))[1] for model in models]
        for step in run.steps(run.loader(TensorDataset(torch.ones(2, 1))), epochs=1):
            for (inputs,) in step:
                step.backward(models[0](inputs).mean() * float("inf"), optimizer=first)
                step.backward(models[1](inputs).mean() * 0.01, optimizer=second)
            step.update()
        assert [trained.skips.total for trained in run._trained] == [1, 0]


def test_samples_of_a_short_step_are_a_whole_number(tmp_path: Path) -> None:
    train_on(torch.ones(3, 1), dir=tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert ['"samples":2,' in lines[0], '"samples":1,' in lines[1]] == [True, True]

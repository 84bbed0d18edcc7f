"""Mistakes of a script, each answered by one clear sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep
from instep.train.prepare import _check_sync_batch_norm
from instep.train.slots import plan_slots


def rows(count: int = 32) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3), torch.randn(count, 1))


def open_run(**arguments: Any) -> instep.Run:
    return instep.Run(**{"global_batch": 8, "micro_batch": 2, **arguments})


def first_step(run: instep.Run, model: nn.Module | None = None) -> tuple[Any, nn.Module]:
    model = model or nn.Linear(3, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return next(iter(run.steps(run.loader(rows()), epochs=1))), model


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"global_batch": 0}, "global_batch=0 has to be a whole number of at least 1."),
        ({"global_batch": 6.0}, "global_batch=6.0 has to be a whole number"),
        ({"precision": "half"}, "precision='half' is not known. Allowed: 'fp32', 'bf16', 'fp16'."),
        ({"clip_norm": 0}, "clip_norm=0 has to be a number above 0, or None."),
        ({"seed": "x"}, "seed='x' has to be a whole number."),
        ({"compress": "zip"}, "compress='zip' is not known. Allowed: 'bf16', 'fp16', 'powersgd', or None."),
        ({"parallel": "ring"}, "parallel='ring' is not a way to split a model. Allowed: 'ddp', 'zero1'"),
        ({"checkpoint_every": 5}, "checkpoint_every=5 has no place to save to: give dir="),
        ({"keep": 0}, "keep=0 has to be a whole number of at least 1."),
    ],
)
def test_names_the_argument_and_what_is_allowed(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        open_run(**arguments)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            (10, 4, 1),
            "micro_batch=4 does not divide global_batch=10. These do: 1, 2, 5, 10.",
        ),
        (
            (8, 4, 3),
            "3 ranks cannot share global_batch=8: with micro_batch=4 a step has 2 micro-batches, fewer than ranks. Either "
            "start at most 2 processes, or set micro_batch to one of 1, 2, or set global_batch to a multiple of 4 that is "
            "at least 12.",
        ),
    ],
)
def test_names_sizes_that_fit(sizes: tuple[int, int, int], text: str) -> None:
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        plan_slots(sizes[0], sizes[1], 0, sizes[2])


def no_optimizer(run: instep.Run) -> None:
    model = run.prepare(nn.Linear(3, 1))
    for step in run.steps(run.loader(rows()), epochs=1):
        for x, y in step:
            step.backward((model(x) - y).square().mean())


def vector_loss(run: instep.Run) -> None:
    step, model = first_step(run)
    for x, y in step:
        step.backward((model(x) - y).square())


def loss_without_graph(run: instep.Run) -> None:
    step, model = first_step(run)
    for x, y in step:
        step.backward((model(x) - y).square().mean().detach())


def number_as_loss(run: instep.Run) -> None:
    step, _ = first_step(run)
    for _x, _y in step:
        step.backward(1.0)


def negative_weight(run: instep.Run) -> None:
    step, model = first_step(run)
    for x, _y in step:
        step.backward(model(x).mean(), weight=-1)


def update_first(run: instep.Run) -> None:
    step, _ = first_step(run)
    step.update()


def plain_backward(run: instep.Run) -> None:
    step, model = first_step(run)
    for x, y in step:
        (model(x) - y).square().mean().backward()
    step.update()


def own_optimizer_step(run: instep.Run) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for step in run.steps(run.loader(rows()), epochs=1):
        for x, _ in step:
            step.backward(model(x).mean())
        optimizer.step()


def own_scheduler_step(run: instep.Run) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run.prepare(model, optimizer, scheduler)
    for step in run.steps(run.loader(rows()), epochs=1):
        for x, _ in step:
            step.backward(model(x).mean())
        step.update()
        scheduler.step()


def unknown_optimizer(run: instep.Run) -> None:
    step, model = first_step(run)
    step.update(torch.optim.SGD(model.parameters(), lr=0.1))


def nothing_to_train(run: instep.Run) -> None:
    model = nn.Linear(3, 1).requires_grad_(False)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def no_model(run: instep.Run) -> None:
    run.prepare(lambda x: x)  # type: ignore[arg-type]


def scheduler_alone(run: instep.Run) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))


def closure_optimizer(run: instep.Run) -> None:
    model = nn.Linear(3, 1)
    run.prepare(model, torch.optim.LBFGS(model.parameters()))


def sync_over_many_micro_batches(run: instep.Run) -> None:
    run.prepare(nn.BatchNorm1d(3), sync_batch_norm=True)


def mean_inside_evaluation(run: instep.Run) -> None:
    for _ in run.evaluate(run.loader(rows())):
        run.mean(1.0)


def dataset_as_loader(run: instep.Run) -> None:
    run.steps(rows(), epochs=1)  # type: ignore[arg-type]


def neither_epochs_nor_steps(run: instep.Run) -> None:
    run.steps(run.loader(rows()))


def epochs_without_data(run: instep.Run) -> None:
    run.steps(epochs=2)


def empty_dataset(run: instep.Run) -> None:
    run.loader(rows(0))


def too_short_dataset(run: instep.Run) -> None:
    run.loader(rows(5), drop_last=True)


def save_without_directory(run: instep.Run) -> None:
    run.save()


def restore_by_name_without_directory(run: instep.Run) -> None:
    run.restore("step-5")


def weights_that_do_not_match(run: instep.Run) -> None:
    run.mean([1.0, 2.0], [1, 2, 3])


def too_many_calls(run: instep.Run) -> None:
    step, model = first_step(run)
    for x, _ in step:
        for _ in range(17):
            step.backward(model(x).mean())


@pytest.mark.parametrize(
    ("global_batch", "advice"),
    [
        (12, "Set micro_batch=3, which is global_batch / ranks, or leave sync_batch_norm out."),
        (
            10,
            "Take a global_batch that 4 divides (10 is not), with micro_batch = global_batch / 4, or leave sync_batch_norm out.",
        ),
    ],
)
def test_sync_batch_norm_names_sizes_that_are_possible(global_batch: int, advice: str) -> None:
    run: Any = SimpleNamespace(
        _grid=SimpleNamespace(data=SimpleNamespace(size=4)),
        _slots=SimpleNamespace(count=10),
        _arguments=SimpleNamespace(global_batch=global_batch),
    )
    with pytest.raises(
        instep.UsageError, match=f"micro-batch: 10 micro-batches on 4 ranks do not. {re.escape(advice)}$"
    ):
        _check_sync_batch_norm(run)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (no_optimizer, "step.backward has nothing to train: give an optimizer to run.prepare(model, optimizer) first."),
        (vector_loss, "step.backward got a loss of shape (2, 1); it has to be a scalar"),
        (loss_without_graph, "step.backward got a loss without a graph: it depends on no parameter"),
        (number_as_loss, "step.backward got 1.0; it takes the loss, a tensor of shape ()."),
        (negative_weight, "step.backward(weight=-1): the weight is the number of items"),
        (update_first, "step.update() of step 0 came before any backward. Iterate the step"),
        (own_optimizer_step, "SGD.step() was called by the script. step.update() does it"),
        (own_scheduler_step, "StepLR.step() was called by the script as well: step.update() calls it once per step."),
        (unknown_optimizer, "step.update got an optimizer that run.prepare did not take."),
        (nothing_to_train, "run.prepare got an optimizer without a parameter that requires a gradient"),
        (no_model, "run.prepare got a function as its model; it takes a torch.nn.Module."),
        (scheduler_alone, "run.prepare got a scheduler without its optimizer"),
        (closure_optimizer, "run.prepare cannot take LBFGS: it calls the model again within a step."),
        (
            sync_over_many_micro_batches,
            "sync_batch_norm=True takes its statistics over the global batch at once, so each rank has to hold one "
            "micro-batch: 4 micro-batches on 1 rank do not. Set micro_batch=8, which is global_batch / ranks, or leave",
        ),
        (
            mean_inside_evaluation,
            "run.mean was called inside run.evaluate, where ranks have different numbers of batches",
        ),
        (dataset_as_loader, "run.steps got a TensorDataset; it takes what run.loader(...) returns."),
        (
            neither_epochs_nor_steps,
            "run.steps got neither epochs= nor steps=: give one of the two, as run.steps(loader, epochs=10).",
        ),
        (epochs_without_data, "run.steps without a loader has no epochs: say how many steps"),
        (save_without_directory, "run.save needs a place for checkpoints: give Run a dir"),
        (restore_by_name_without_directory, "run.restore('step-5') needs a place for checkpoints"),
        (weights_that_do_not_match, "run.mean got 2 values and 3 weights; it takes one weight per value."),
        (too_many_calls, "step.backward was called more than 16 times for one micro-batch."),
    ],
)
def test_says_what_is_wrong_and_what_to_do(mistake: Callable[[instep.Run], None], text: str) -> None:
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)), open_run() as run:
        mistake(run)


@pytest.mark.parametrize("mistake", [empty_dataset, too_short_dataset])
def test_refuses_data_without_a_step(mistake: Callable[[instep.Run], None]) -> None:
    with pytest.raises(instep.UsageError, match=r"(?i)dataset"), open_run() as run:
        mistake(run)


def test_names_the_line_of_a_plain_backward() -> None:
    with pytest.raises(instep.UsageError) as caught, open_run() as run:
        plain_backward(run)
    text = str(caught.value)
    assert re.search(r"loss.backward\(\) at .*test_bad_input.py:\d+ went past step.backward\(loss\)", text)
    assert "(model(x) - y).square().mean().backward()" in text


def test_a_run_is_used_inside_with() -> None:
    with pytest.raises(instep.UsageError, match=r"This run is not open: use it inside `with instep\.Run"):
        _ = open_run().rank


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(instep.UsageError, match="cannot be written"), open_run(dir=blocked / "run"):
        pass

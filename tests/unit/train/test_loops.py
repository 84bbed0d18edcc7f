"""Calls of run.steps one after the other, and where they stand after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep


def train(folder: Path, first: int, second: int, leave_at: int | None = None) -> tuple[list[int], list[int]]:
    """Indices of the steps that each of two loops took; the first may be left early."""
    with instep.Run(global_batch=4, dir=folder) as run:
        model = nn.Linear(2, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(TensorDataset(torch.ones(16, 2)), shuffle=True)
        run.restore()
        taken: tuple[list[int], list[int]] = [], []
        for number, steps in enumerate((first, second)):
            if not steps:
                continue
            for step in run.steps(loader, steps=steps):
                for (x,) in step:
                    step.backward(model(x).mean())
                step.update()
                taken[number].append(step.index)
                if number == 0 and step.index == leave_at:
                    break
        run.save()
        return taken


def test_a_finished_loop_takes_no_more_steps(tmp_path: Path) -> None:
    assert train(tmp_path, 3, 2) == ([0, 1, 2], [3, 4])
    assert train(tmp_path, 3, 2) == ([], [])


def test_the_last_loop_may_be_made_longer(tmp_path: Path) -> None:
    assert train(tmp_path, 3, 0) == ([0, 1, 2], [])
    assert train(tmp_path, 5, 0) == ([3, 4], [])


def test_a_loop_that_was_left_is_not_taken_up_again_when_a_later_one_had_begun(tmp_path: Path) -> None:
    assert train(tmp_path, 6, 2, leave_at=1) == ([0, 1], [2, 3])
    assert train(tmp_path, 6, 4) == ([], [4, 5])


def test_synchronised_batch_norm_refuses_streams() -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(torch.ones(8, 2))

    refused = pytest.raises(
        instep.UsageError, match="sync_batch_norm=True needs every rank to have samples in every step"
    )
    with refused, instep.Run(global_batch=2, micro_batch=2) as run:
        model = nn.BatchNorm1d(2)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_batch_norm=True)
        next(iter(run.steps(run.loader(Stream()), epochs=1)))


@pytest.mark.parametrize("leaves", [True, False])
def test_says_that_micro_batches_were_left_out(leaves: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with instep.Run(global_batch=8, micro_batch=2) as run:
        model = nn.Linear(2, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(run.loader(TensorDataset(torch.ones(16, 2))), epochs=1):
            for number, (x,) in enumerate(step):
                if number == 2 and not leaves:
                    continue
                step.backward(model(x).mean())
                if leaves:
                    break
            step.update()
    assert capsys.readouterr().err.count("micro-batches without step.backward") == 1


def test_says_nothing_of_a_whole_step(capsys: pytest.CaptureFixture[str]) -> None:
    with instep.Run(global_batch=8, micro_batch=2) as run:
        model = nn.Linear(2, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(run.loader(TensorDataset(torch.ones(13, 2))), epochs=1):
            for (x,) in step:
                step.backward(model(x).mean())
            step.update()
    assert "without step.backward" not in capsys.readouterr().err


def test_every_kth_checkpoint_stays_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_KEEP_EVERY", "4")
    with instep.Run(global_batch=4, dir=tmp_path, checkpoint_every=2, keep=1) as run:
        model = nn.Linear(2, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(run.loader(TensorDataset(torch.ones(16, 2))), steps=10):
            for (x,) in step:
                step.backward(model(x).mean())
            step.update()
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {"step-4", "step-8", "step-10"}

"""Local SGD against replicas trained one after the other in plain PyTorch, in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import instep
from run_ranks import run_ranks
from scenarios import adam, data, mlp, sgd

EVERY, BATCH, MICRO, STEPS = 3, 12, 2, 8
SPLIT = instep.Parallel(replicate=None, average_every=EVERY)
OPTIMIZERS = {"adamw": adam, "sgd": sgd}


def start_model() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def train(rank: int, size: int, name: str, clip: float | None, folder: str | None = None) -> dict[str, Any]:
    with instep.Run(global_batch=BATCH, micro_batch=MICRO, parallel=SPLIT, clip_norm=clip, dir=folder) as run:
        model = start_model()
        optimizer = OPTIMIZERS[name](model)
        run.prepare(model, optimizer)
        run.restore()
        losses, before, apart = [], [], []
        for step in run.steps(run.loader(data()), steps=STEPS):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
            losses.append(step.loss)
            apart.append(len({str(w) for w in run.gather(model[0].weight.tolist())}) > 1)
            if folder and step.index == 3:
                run.save()
                before = [p.detach().clone() for p in model.parameters()]
                moments = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
                run.gather(None)
                return {"parameters": before, "moments": moments}
        return {"losses": losses, "apart": apart, "parameters": [p.detach().clone() for p in model.parameters()]}


def by_hand(size: int, name: str, clip: float | None) -> tuple[list[float], list[Tensor]]:
    """Each replica takes its own slots of each global batch; gradients are normalised as if all had equally many."""
    replicas = [start_model() for _ in range(size)]
    optimizers = [OPTIMIZERS[name](replica) for replica in replicas]
    inputs, targets = data().tensors
    slots, losses = BATCH // MICRO, []
    for number in range(STEPS):
        start = number % (len(inputs) // BATCH + 1) * BATCH
        x, y = inputs[start : start + BATCH], targets[start : start + BATCH]
        total = 0.0
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers)):
            mine = [slot for slot in range(slots) if slot * size // slots == rank]
            rows = torch.tensor([slot * MICRO + i for slot in mine for i in range(MICRO) if slot * MICRO + i < len(x)])
            optimizer.zero_grad()
            if len(rows):
                loss = F.cross_entropy(replica(x[rows]), y[rows], reduction="sum")
                (loss * size / len(x)).backward()
                total += float(loss.detach())
                if clip is not None:
                    nn.utils.clip_grad_norm_(replica.parameters(), clip)
            optimizer.step()
        losses.append(total / len(x))
        if (number + 1) % EVERY == 0 or number + 1 == STEPS:
            average(replicas)
    return losses, [p.detach() for p in replicas[0].parameters()]


def average(replicas: list[nn.Module]) -> None:
    with torch.no_grad():
        for parts in zip(*(replica.parameters() for replica in replicas)):
            mean = torch.stack(list(parts)).mean(0)
            for part in parts:
                part.copy_(mean)


@pytest.mark.parametrize(("size", "name", "clip"), [(2, "adamw", 0.5), (3, "sgd", None)])
def test_trains_as_replicas_by_hand(size: int, name: str, clip: float | None) -> None:
    losses, parameters = by_hand(size, name, clip)
    for rank in run_ranks(train, size, name, clip):
        assert rank["losses"] == pytest.approx(losses, rel=1e-10)
        assert rank["apart"] == [(number + 1) % EVERY != 0 for number in range(STEPS)]
        for expected, found in zip(parameters, rank["parameters"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def continue_from(rank: int, size: int, folder: str) -> dict[str, Any]:
    with instep.Run(global_batch=BATCH, micro_batch=MICRO, parallel=SPLIT, dir=folder) as run:
        model = mlp()
        optimizer = adam(model)
        run.prepare(model, optimizer)
        assert run.restore()
        moments = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
        found = {"parameters": [p.detach().clone() for p in model.parameters()], "moments": moments}
        for step in run.steps(run.loader(data()), steps=5):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
        run.export(f"{folder}/weights-{size}.safetensors")
        return found


def test_a_checkpoint_between_averages_holds_the_mean_for_any_number_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(train, 2, "adamw", None, str(tmp_path))
    assert all(torch.equal(*pair) for pair in zip(*(rank["parameters"] for rank in saved)))
    for size in (2, 1):
        for rank in run_ranks(continue_from, size, str(tmp_path)):
            assert all(torch.equal(*pair) for pair in zip(rank["parameters"], saved[0]["parameters"], strict=True))
            for there, here in zip(saved[0]["moments"], rank["moments"], strict=True):
                assert all(torch.equal(here[key], value) for key, value in there.items())
    assert load_file(tmp_path / "weights-2.safetensors").keys() == load_file(tmp_path / "weights-1.safetensors").keys()


def one_is_not_finite(rank: int, size: int) -> tuple[list[bool], list[Tensor], list[Tensor]]:
    with instep.Run(global_batch=BATCH, micro_batch=MICRO, parallel=SPLIT) as run:
        model = start_model()
        run.prepare(model, adam(model))
        skipped: list[bool] = []
        before: list[Tensor] = []
        for step in run.steps(run.loader(data()), steps=2):
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                step.backward(loss * float("nan") if step.index == 1 and run.rank == 1 else loss)
            before = [p.detach().clone() for p in model.parameters()]
            step.update()
            skipped.append(step.skipped)
            if step.index == 1:
                return skipped, before, copy.deepcopy([p.detach() for p in model.parameters()])
        return skipped, [], []


def test_all_ranks_skip_a_step_that_is_not_finite_on_one() -> None:
    for skipped, before, after in run_ranks(one_is_not_finite, 2):
        assert skipped == [False, True]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))

"""A run that is interrupted and goes on, on another number of ranks, ends as one that was not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import instep
from run_ranks import run_ranks
from scenarios import CLASSES, FEATURES, Noisy, Stream, adam, data, mlp, one_cycle, sgd

STOP_AFTER = 8  # in the middle of the second epoch


class Interrupted(Exception):
    pass


class WithState(IterableDataset[Any]):
    """Knows how to go on by itself, and would give other samples if it were read again from its start."""

    def __init__(self) -> None:
        self.taken = 0
        self.rows = list(zip(*data().tensors))

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        rows = self.rows if info is None else self.rows[info.id :: info.num_workers]
        while self.taken < len(rows):
            self.taken += 1
            yield rows[self.taken - 1]
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def run_of(folder: str | None, **arguments: Any) -> instep.Run:
    more = {} if folder is None else {"dir": folder, "checkpoint_every": 3}
    return instep.Run(**{"global_batch": 16, "micro_batch": 2, "seed": 5, **more, **arguments})


def finish(run: instep.Run, *models: nn.Module) -> dict[str, Any]:
    state = {f"{i}.{key}": value.clone() for i, model in enumerate(models) for key, value in model.state_dict().items()}
    return {"history": run.state["history"], "state": state}


def supervised(
    folder: str | None, stop: int | None, source: Any = data, loader: dict[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    with run_of(folder, **arguments) as run:
        model = mlp(nn.Dropout(0.3))
        if arguments.get("precision") == "fp16":
            model.float()
        optimizer = adam(model)
        run.prepare(model, optimizer, one_cycle(optimizer))
        train = run.loader(source(), **({"shuffle": True} if loader is None else loader))
        run.state["history"] = []
        run.restore()
        for step in run.steps(train, epochs=3):
            if step.index == stop:
                raise Interrupted
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x.to(model[0].weight.dtype)), y))
            step.update()
            run.state["history"].append((step.index, step.epoch, step.loss, step.grad_norm))
        return finish(run, model)


def workers(folder: str | None, stop: int | None) -> dict[str, Any]:
    return supervised(folder, stop, Noisy, {"shuffle": True, "num_workers": 1})


def iterable(folder: str | None, stop: int | None) -> dict[str, Any]:
    return supervised(folder, stop, Stream, {})


def iterable_with_state(folder: str | None, stop: int | None) -> dict[str, Any]:
    return supervised(folder, stop, WithState, {})


def fp16(folder: str | None, stop: int | None) -> dict[str, Any]:
    return supervised(folder, stop, precision="fp16")


def gan(folder: str | None, stop: int | None) -> dict[str, Any]:
    with run_of(folder) as run:
        generator, critic = (
            mlp(nn.Dropout(0.2)),
            nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        )
        opt_g, opt_d = adam(generator), adam(critic)
        run.prepare(generator, opt_g)
        run.prepare(critic, opt_d)
        train = run.loader(data(), shuffle=True)
        run.state["history"] = []
        run.restore()
        for step in run.steps(train, epochs=3):
            if step.index == stop:
                raise Interrupted
            for x, _ in step:
                step.backward(critic(generator(x).detach()).mean() - critic(x[:, :CLASSES]).mean(), optimizer=opt_d)
            step.update(opt_d)
            run.state["history"].append((step.index, step.epoch, step.loss, 0.0))
            for x, _ in step:
                step.backward(-critic(generator(x)).mean())
            step.update(opt_g)
        return finish(run, generator, critic)


def plateau_without_loader(folder: str | None, stop: int | None) -> dict[str, Any]:
    with run_of(folder) as run:
        model = mlp()
        optimizer = sgd(model)
        run.prepare(model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5))
        run.state["history"], run.state["noise"] = [], torch.zeros(3)
        run.restore()
        for step in run.steps(steps=14):
            if step.index == stop:
                raise Interrupted
            for _ in step:
                step.backward(model(torch.randn(2, FEATURES, dtype=torch.float64)).square().mean())
            step.update()
            run.schedule(1.0)  # never better, so the rate falls
            run.state["noise"] = run.state["noise"] + 1
            run.state["history"].append((step.index, step.epoch, step.loss, optimizer.param_groups[0]["lr"]))
        assert run.state["noise"].tolist() == [14.0] * 3
        return finish(run, model)


SCENARIOS = {
    "supervised": supervised,
    "workers": workers,
    "iterable": iterable,
    "iterable with state": iterable_with_state,
    "fp16": fp16,
    "gan": gan,
    "plateau": plateau_without_loader,
}


def train(rank: int, size: int, name: str, folder: str | None, stop: int | None) -> dict[str, Any] | None:
    try:
        return SCENARIOS[name](folder, stop)
    except Interrupted:
        return None


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("supervised", 2, 3),
        ("supervised", 1, 1),
        ("workers", 1, 2),
        ("iterable", 2, 1),
        ("iterable with state", 3, 2),
        ("fp16", 1, 1),
        ("gan", 2, 1),
        ("plateau", 1, 2),
    ],
)
def test_ends_as_if_it_had_not_been_interrupted(tmp_path: Path, name: str, first: int, second: int) -> None:
    (expected,) = run_ranks(train, 1, name, None, None)
    assert run_ranks(train, first, name, str(tmp_path), STOP_AFTER) == [None] * first
    found = run_ranks(train, second, name, str(tmp_path), None)
    tolerance = 0.0 if first == second == 1 else 1e-11
    for each in found:
        assert [row[:2] for row in each["history"]] == [row[:2] for row in expected["history"]]
        for ours, theirs in zip(each["history"], expected["history"]):
            assert ours[2:] == pytest.approx(theirs[2:], rel=tolerance, abs=tolerance)
        for key, value in expected["state"].items():
            torch.testing.assert_close(each["state"][key], value, rtol=tolerance, atol=tolerance)


def take_weights(rank: int, size: int, folder: str) -> list[bool]:
    """Weights of a finished run, of an export of it, and of a file that is on one rank only."""
    with run_of(None) as run:
        generator, critic = mlp(), nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        run.prepare(generator, adam(generator))
        run.prepare(critic, adam(critic))
        before = critic[0].weight.clone()
        run.load_weights(folder, model=critic)
        run.export(f"{folder}/critic.safetensors", model=critic)
        changed = not torch.equal(before, critic[0].weight)
        taken = critic[0].weight.clone()
        with torch.no_grad():
            critic[0].weight.zero_()
        run.load_weights(f"{folder}/critic.safetensors", model=critic)
        try:
            run.load_weights(f"{folder}/critic.safetensors" if rank == 0 else "nowhere.safetensors", model=critic)
            refused = False
        except instep.CheckpointError as error:
            refused = str(error) == "nowhere.safetensors does not exist."
        return [changed, torch.equal(taken, critic[0].weight), refused]


def test_weights_go_from_run_to_run(tmp_path: Path) -> None:
    run_ranks(train, 1, "gan", str(tmp_path), None)
    assert run_ranks(take_weights, 2, str(tmp_path)) == [[True, True, True]] * 2


def fail_to_write(rank: int, size: int, folder: str) -> tuple[str, int]:
    import instep.train.checkpoint.saving as saving

    write = saving.write_durably

    def full(path: Path, contents: Any) -> Any:
        if rank == 1 and "step-3" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, contents)

    saving.write_durably = full
    reached = 0
    try:
        with run_of(folder, checkpoint_every=None) as run:
            model = mlp()
            run.prepare(model, adam(model))
            for step in run.steps(steps=100000):
                reached = step.index
                if step.index == 3:
                    run.save()
                for _ in step:
                    step.backward(model(torch.randn(2, FEATURES, dtype=torch.float64)).square().mean())
                step.update()
    except instep.CheckpointError as error:
        return str(error), reached
    return "not raised", reached


def test_a_save_that_failed_stops_all_ranks_at_one_step(tmp_path: Path) -> None:
    first, second = run_ranks(fail_to_write, 2, str(tmp_path))
    assert first == second
    text, reached = first
    assert text.startswith("the checkpoint of step 3 could not be written to ")
    assert text.endswith("by rank 1: No space left on device. The older checkpoints are whole. Make room there.")
    assert 3 <= reached < 99999

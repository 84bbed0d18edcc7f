"""Every schedule of a pipeline against one process with the explicit loop, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import instep
from instep.records.schedules import SCHEDULES
from run_ranks import run_ranks
from scenarios import CLASSES, FEATURES, adam, data, sgd, step_lr, two_groups, whole

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


class Loose(Deep):
    """Without a parameter that belongs to no module of one stage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.shift
        self.shift = 0.0


class ShakyBlock(Block):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x, scale) * (1 + 0.1 * random.random()) + 0.01 * float(numpy.random.rand())


class Shaky(Loose):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ShakyBlock(10, 0.2, False) for _ in range(4)])
        self.double()


class Poison(torch.autograd.Function):
    """The gradient is infinite where a number says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, infinite: bool) -> Tensor:
        ctx.infinite = infinite
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * float("inf") if ctx.infinite else gradient, None


class Poisoned(Loose):
    """Some steps are not finite in the first stage, and in no other."""

    def __init__(self) -> None:
        super().__init__()
        self.into.register_forward_hook(lambda _, args, output: Poison.apply(output, bool(args[0][0, 0] > 0.9)))


class Structured(Loose):
    """Nested outputs, some of which are no tensors."""

    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "more": (x.mean(), None, 3)}


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


class Single(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def chain() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(FEATURES, 12)]
    for _ in range(4):
        layers += [nn.ReLU(inplace=True), nn.Linear(12, 12)]
    return nn.Sequential(*layers, nn.Linear(12, CLASSES)).double()


def token_mean(out: Tensor, y: Tensor) -> tuple[Tensor, int]:
    mask = y > 0  # some micro-batches have many of these, some few, some none
    return F.cross_entropy(out[mask], y[mask]), int(mask.sum())


def of_structure(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out["logits"], y) + 0.1 * out["more"][0] * out["more"][2]


def infinite_once(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(out, y)
    return loss * float("inf") if y[0] == 1 and y[-1] == 3 else loss


def train(
    model_of: Callable[[], nn.Module],
    loss_fn: Callable[..., Any] = F.cross_entropy,
    optimizer_of: Callable[..., torch.optim.Optimizer] = adam,
    rows: int = 43,
    scheduler_of: Callable[..., Any] | None = None,
    explicit: bool = False,
    evaluate: bool = False,
    frozen: tuple[str, ...] = (),
    **arguments: Any,
) -> dict[str, Any]:
    with instep.Run(**{"global_batch": 16, "micro_batch": 2, **arguments}) as run:
        torch.manual_seed(1)
        model = model_of()
        optimizer = optimizer_of(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not name.startswith(frozen))
        scheduler = scheduler_of(optimizer) if scheduler_of else None
        run.prepare(model, optimizer, scheduler)
        loader, test = run.loader(data(rows), shuffle=True), run.loader(data(21))
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
    "batch norm": lambda **split: train(lambda: Deep(norm=True), optimizer_of=sgd, rows=44, micro_batch=4, **split),
    "tied over stages": lambda **split: train(lambda: Deep(tied=True), clip_norm=0.1, **split),
    "groups and schedule": lambda **split: train(Deep, optimizer_of=two_groups, scheduler_of=step_lr, **split),
    "not finite": lambda **split: train(Deep, infinite_once, **split),
    "evaluated": lambda **split: train(Deep, evaluate=True, **split),
    "no loose parameter, tied": lambda **split: train(lambda: Loose(tied=True), clip_norm=0.1, evaluate=True, **split),
    "no loose parameter": lambda **split: train(Loose, clip_norm=0.1, evaluate=True, **split),
    "encoder": lambda **split: train(Encoder, clip_norm=0.1, evaluate=True, **split),
    "first stage frozen": lambda **split: train(Loose, frozen=BEFORE, optimizer_of=sgd, **split),
    "last stage frozen": lambda **split: train(Loose, frozen=BEHIND, optimizer_of=sgd, **split),
    "Python's and numpy's random numbers": lambda **split: train(Shaky, evaluate=True, **split),
    "three micro-batches": lambda **split: train(Loose, token_mean, global_batch=12, micro_batch=4, **split),
    "one micro-batch": lambda **split: train(Loose, micro_batch=16, **split),
    "not finite in the first stage": lambda **split: train(Poisoned, optimizer_of=sgd, **split),
    "structured": lambda **split: train(Structured, of_structure, **split),
    "recomputed": lambda **split: train(lambda: Deep(0.3), recompute="blocks", **split),
    "bf16": lambda **split: train(Single, precision="bf16", evaluate=True, **split),
    "fp16": lambda **split: train(Single, precision="fp16", **split),
}
TOLERANCES = {"bf16": 1e-3, "fp16": 1e-3}
BEFORE = ("into", "blocks.0", "blocks.1")  # the first stage of two
BEHIND = ("blocks.2", "blocks.3", "again", "out")
FIRST = next(iter(TRAININGS))
Pipe = partial(instep.Parallel, pipeline=2)
BY_HAND = ["blocks.0", "blocks.1", "blocks.3"]
ROWS: list[tuple[int, instep.Parallel, list[str]]] = [
    (2, Pipe(), list(TRAININGS)),
    (4, Pipe(schedule="zbv", replicate=2), [FIRST, "token mean", "batch norm", "tied over stages"]),
    (3, instep.Parallel(pipeline=3, schedule="gpipe"), [FIRST]),
    (2, Pipe(schedule="interleaved_1f1b", cut=BY_HAND), [FIRST]),
    (2, Pipe(schedule="interleaved_zero_bubble"), [FIRST, "token mean", "recomputed", "fp16", "first stage frozen"]),
    (2, Pipe(schedule="dualpipev"), [FIRST]),
    (4, Pipe(shard=2), ["no loose parameter, tied", "three micro-batches"]),
    (4, Pipe(shard=2, schedule="zbv"), ["no loose parameter, tied"]),
    (4, Pipe(tensor=2), ["encoder"]),
]
OF_WHOLE_MODULES = ["no loose parameter", "three micro-batches", "last stage frozen", "not finite in the first stage"]
SLOW_ROWS: list[tuple[int, instep.Parallel, list[str]]] = [
    *((4, Pipe(schedule=name, replicate=2), [FIRST, "three micro-batches"]) for name in SCHEDULES),
    *((4, Pipe(schedule=name, shard=2), OF_WHOLE_MODULES) for name in SCHEDULES),
    *((4, Pipe(schedule=name, tensor=2), ["encoder"]) for name in SCHEDULES),
    (4, Pipe(shard=2, gathered=True), [*OF_WHOLE_MODULES, "no loose parameter, tied"]),
    (4, Pipe(shard=2, schedule="dualpipev"), ["no loose parameter, tied"]),
    (4, Pipe(shard=2, cut=["out"]), ["no loose parameter, tied"]),  # in one stage
    (4, Pipe(shard=2, schedule="interleaved_1f1b", cut=["blocks.0", "blocks.3", "out"]), ["no loose parameter, tied"]),
    (4, Pipe(replicate=2), [name for name in TRAININGS if name != "one micro-batch"]),
    (4, Pipe(replicate=2, share_optimizer=True), [FIRST, "encoder"]),
    (8, Pipe(replicate=2, shard=2), ["no loose parameter, tied"]),
    (8, Pipe(tensor=2, shard=2), ["encoder"]),
    (8, Pipe(tensor=2, replicate=2, schedule="zbv"), ["encoder"]),
]


def name_of(row: tuple[int, instep.Parallel, list[str]]) -> str:
    return f"{row[1].describe()}, {row[1].schedule}"


def play(rank: int, size: int, names: list[str], parallel: Any, explicit: bool = False) -> dict[str, Any]:
    return {name: TRAININGS[name](parallel=parallel, explicit=explicit) for name in names}


@cache
def alone() -> dict[str, Any]:
    return run_ranks(play, 1, list(TRAININGS), "ddp", True)[0]


def check_row(size: int, parallel: Any, names: list[str]) -> None:
    ranks = run_ranks(play, size, names, parallel)
    for name in names:
        expected, tolerance = alone()[name], TOLERANCES.get(name, TOLERANCE)
        for rank in ranks:
            for there, here in zip(expected["history"], rank[name]["history"], strict=True):
                assert here == pytest.approx(there, rel=tolerance, nan_ok=True), name
            for key, value in rank[name]["state"].items():
                torch.testing.assert_close(
                    value, expected["state"][key], rtol=tolerance, atol=tolerance, msg=f"{name}: {key}"
                )
        assert set().union(*(rank[name]["state"] for rank in ranks)) == set(expected["state"]), name


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_trains_as_one_process_does(row: Any) -> None:
    check_row(*row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW_ROWS, ids=name_of)
def test_trains_as_one_process_does_in_rarer_splits(row: Any) -> None:
    check_row(*row)


@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_forward_backward_is_the_explicit_loop_in_every_other_split(parallel: str) -> None:
    check_row(2, parallel, ["token mean"])


def train_partly(rank: int, size: int, folder: str, parallel: Any, last: int) -> dict[str, Any]:
    with instep.Run(global_batch=16, micro_batch=2, parallel=parallel, dir=folder) as run:
        model = Loose(drop=0.3, tied=True)
        optimizer = adam(model)
        run.prepare(model, optimizer, offload=run.world_size == 4)
        run.restore()
        for step in run.steps(run.loader(data(43), shuffle=True), epochs=2):
            step.forward_backward(model, F.cross_entropy)
            step.update()
            if step.index == last:
                run.save()
                break
        run.export(f"{folder}/weights.safetensors")
        return {}


def test_continues_in_another_split(tmp_path: Path) -> None:
    run_ranks(train_partly, 1, str(tmp_path / "one"), "ddp", 5)
    for size, parallel, last in (
        (2, Pipe(schedule="zbv"), 1),
        (2, "zero3", 2),
        (4, Pipe(shard=2), 3),
        (3, instep.Parallel(pipeline=3, schedule="gpipe"), 5),
    ):
        run_ranks(train_partly, size, str(tmp_path / "parts"), parallel, last)
    expected, weights = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "parts"))
    assert expected.keys() == weights.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=TOLERANCE, atol=TOLERANCE)


def make_mistakes(rank: int, size: int) -> list[str]:
    said: list[str] = []

    def note(call: Callable[[], Any]) -> None:
        with pytest.raises(instep.UsageError) as caught:
            call()
        said.append(str(caught.value))

    with instep.Run(global_batch=16, micro_batch=2, parallel=Pipe(shard=2)) as run:
        note(lambda: run.prepare(Deep(), None))
    with instep.Run(global_batch=16, micro_batch=2, parallel=Pipe(replicate=2)) as run:
        model, other = Deep(), Deep()
        run.prepare(model, adam(model))
        step = next(iter(run.steps(run.loader(data(43)), epochs=1)))
        note(lambda: model(torch.zeros(2, FEATURES, dtype=torch.float64)))
        note(lambda: step.all_rows(lambda x, _: model(x) + model(2 * x)))
        rows = step.all_rows(lambda x, _: model(x))
        step.backward(rows.square().mean())
        note(lambda: step.backward(rows.mean()))
        note(lambda: step.forward_backward(other, F.cross_entropy))
        note(lambda: step.forward_backward(model, cast("Any", 3)))
        model.requires_grad_(False)
        note(lambda: step.forward_backward(model, F.cross_entropy))
    return said


def test_mistakes_with_a_pipeline_are_told_in_one_sentence() -> None:
    for rank, said in enumerate(run_ranks(make_mistakes, 4)):
        assert said == [
            "a pipeline with sharding shares out whole modules, and shift belongs to a module that lies in several stages. Put "
            "it into a module of its own, or leave shard out of the split.",
            "Deep is cut into 2 stages of a pipeline, so its output has no gradients: train it with "
            "step.forward_backward(model, loss_fn) in place of the inner loop. Called under torch.no_grad(), as in run.evaluate, "
            "it gives its output on every rank.",
            "step.all_rows(fn): fn called a model that is cut into stages 2 times, and a pipeline runs one call at a time. Call "
            "step.all_rows once for each call of the model.",
            "a pipeline takes one loss per step over the rows of step.all_rows: add the losses up, and call step.backward once, "
            "without step.forward_backward beside it.",
            "step.forward_backward got a Deep that run.prepare has not cut; it takes the Deep itself, as run.prepare returned it.",
            "step.forward_backward got 3 as its loss_fn; it takes a function of the model's output and the targets, as "
            "torch.nn.functional.cross_entropy.",
            f"{'shift' if rank < 2 else 'blocks.2.up.weight'} was frozen after run.prepare, which a pipeline cannot follow. Do "
            "it before, and go on from a checkpoint where it has to change.",
        ]

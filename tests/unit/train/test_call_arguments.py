"""Every argument of the public API against values of the wrong kind: one sentence of ours, or it works; nothing else."""

from __future__ import annotations

import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import instep

LOOP: list[Any] = []
LOOP.append(LOOP)

ODD = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "NaN": math.nan,
    "inf": math.inf,
    "10**400": 10**400,
    "empty text": "",
    "text": "a",
    "text with a zero byte": "a\0b",
    "long text": "a" * 300,
    "bytes": b"a",
    "empty list": [],
    "list": [1, 2],
    "list of texts": ["a"],
    "list in itself": LOOP,
    "dict": {"loss": 1.0},
    "set": {1},
    "object": object(),
    "class": nn.Linear,
    "function": lambda: None,
    "lock": threading.Lock(),
    "path": Path("/proc/nothing/here"),
    "missing file": "/nothing/here.safetensors",
    "complex": 1j,
    "scalar tensor": torch.tensor(1.0),
    "vector": torch.ones(3),
    "complex tensor": torch.tensor(1j),
    "meta tensor": torch.empty((), device="meta"),
    "sparse tensor": torch.eye(2).to_sparse(),
    "numpy number": numpy.float32(2),
    "numpy whole number": numpy.int64(2),
    "numpy array": numpy.ones(3),
    "numpy texts": numpy.array(["a"]),
    "numpy time": numpy.datetime64("2020-01-01"),
    "module": nn.Linear(2, 1),
    "lazy module": nn.LazyLinear(1),
    "meta module": nn.Linear(2, 1, device="meta"),
    "dataset": TensorDataset(torch.zeros(4, 2)),
}
RUN_ARGUMENTS = [name for name in inspect.signature(instep.Run.__init__).parameters if name != "self"]


@contextmanager
def open_run(tmp_path: Path | None = None) -> Iterator[tuple[instep.Run, nn.Module, Any, Any]]:
    """A run with a model, an optimizer and a loader."""
    with instep.Run(global_batch=4, micro_batch=2, dir=tmp_path) as run:
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, ReduceLROnPlateau(optimizer))
        yield run, model, optimizer, run.loader(TensorDataset(torch.ones(8, 2)))


def one_step(run: instep.Run, model: nn.Module, loader: Any, **backward: Any) -> None:
    for step in run.steps(loader, steps=1):
        for (inputs,) in step:
            step.backward(**{"loss": model(inputs).mean(), **backward})
        step.update()


def update(run: instep.Run, model: nn.Module, loader: Any, optimizer: Any, method: str) -> None:
    for step in run.steps(loader, steps=1):
        for (inputs,) in step:
            step.backward(model(inputs).mean())
        getattr(step, method)(optimizer)


def mean_of(output: Any, targets: Any) -> Any:
    return output.mean()


def forward_backward(run: instep.Run, loader: Any, model: Any, loss_fn: Any) -> None:
    if inspect.isfunction(model) or model is nn.Linear or loss_fn is nn.Linear:
        return  # what can be called is called, and fails in its own way
    for step in run.steps(loader, steps=1):
        step.forward_backward(model, mean_of if loss_fn is ODD["function"] else loss_fn)
        step.update()


def all_rows(run: instep.Run, loader: Any, fn: Any) -> None:
    for step in run.steps(loader, steps=1):
        step.all_rows(fn)


Call = Callable[[instep.Run, nn.Module, Any, Any, Any], object]  # run, model, optimizer, loader, the odd value
CALLS: dict[str, Call] = {
    "loader(source)": lambda run, model, optimizer, loader, odd: run.loader(odd),
    "prepare(model)": lambda run, model, optimizer, loader, odd: run.prepare(odd),
    "prepare(optimizer)": lambda run, model, optimizer, loader, odd: run.prepare(nn.Linear(2, 1), odd),
    "prepare(scheduler)": lambda run, model, optimizer, loader, odd: run.prepare(
        (m := nn.Linear(2, 1)), SGD(m.parameters(), lr=0.1), odd
    ),
    **{
        f"prepare({name})": lambda run, model, optimizer, loader, odd, name=name: run.prepare(
            nn.Linear(2, 1), **{name: odd}
        )
        for name in ("schedule_every", "sync_batch_norm", "parallel", "recompute", "offload", "compile")
    },
    **{
        f"loader({name})": lambda run, model, optimizer, loader, odd, name=name: run.loader(
            TensorDataset(torch.ones(8, 2)), **{name: odd}
        )
        for name in (
            "shuffle", "drop_last", "collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor",
            "worker_init_fn", "multiprocessing_context", "batch_size", "nonsense",
        )
    },
    "steps(loader)": lambda run, model, optimizer, loader, odd: next(iter(run.steps(odd, steps=1)), None),
    "steps(epochs)": lambda run, model, optimizer, loader, odd: run.steps(loader, epochs=odd),
    "steps(steps)": lambda run, model, optimizer, loader, odd: run.steps(loader, steps=odd),
    "evaluate(loader)": lambda run, model, optimizer, loader, odd: list(run.evaluate(odd)),
    "backward(loss)": lambda run, model, optimizer, loader, odd: one_step(run, model, loader, loss=odd),
    "backward(weight)": lambda run, model, optimizer, loader, odd: one_step(run, model, loader, weight=odd),
    "backward(optimizer)": lambda run, model, optimizer, loader, odd: one_step(run, model, loader, optimizer=odd),
    "update(optimizer)": lambda run, model, optimizer, loader, odd: update(run, model, loader, odd, "update"),
    "reduce(optimizer)": lambda run, model, optimizer, loader, odd: update(run, model, loader, odd, "reduce"),
    "all_rows(fn)": lambda run, model, optimizer, loader, odd: all_rows(
        run, loader, (lambda batch: model(batch[0])) if callable(odd) else odd
    ),
    "forward_backward(model)": lambda run, model, optimizer, loader, odd: forward_backward(run, loader, odd, mean_of),
    "forward_backward(loss_fn)": lambda run, model, optimizer, loader, odd: forward_backward(run, loader, model, odd),
    "forward_backward(loss)": lambda run, model, optimizer, loader, odd: forward_backward(
        run, loader, model, lambda out, _: (out.mean(), odd)
    ),
    "mean(value)": lambda run, model, optimizer, loader, odd: run.mean(odd),
    "mean(weight)": lambda run, model, optimizer, loader, odd: run.mean(1.0, odd),
    "mean(values, weights)": lambda run, model, optimizer, loader, odd: run.mean([1.0, odd], [odd, 2]),
    "sum(value)": lambda run, model, optimizer, loader, odd: run.sum(odd),
    "sum(values)": lambda run, model, optimizer, loader, odd: run.sum([torch.ones(2), odd]),
    "gather(value)": lambda run, model, optimizer, loader, odd: run.gather(odd),
    "schedule(value)": lambda run, model, optimizer, loader, odd: run.schedule(odd),
    "log(value)": lambda run, model, optimizer, loader, odd: run.log(x=odd),
    "log unnamed": lambda run, model, optimizer, loader, odd: run.log(odd),
    "save(metric)": lambda run, model, optimizer, loader, odd: run.save(metric=odd),
    "save(best)": lambda run, model, optimizer, loader, odd: run.save(metric=1.0, best=odd),
    "restore(path)": lambda run, model, optimizer, loader, odd: run.restore(odd),
    "load_weights(path)": lambda run, model, optimizer, loader, odd: run.load_weights(odd),
    "load_weights(model)": lambda run, model, optimizer, loader, odd: run.load_weights("x", model=odd),
    "load_weights(strict)": lambda run, model, optimizer, loader, odd: run.load_weights("x", strict=odd),
    "export(path)": lambda run, model, optimizer, loader, odd: run.export(odd),
    "export(model)": lambda run, model, optimizer, loader, odd: run.export("/nothing/x.safetensors", model=odd),
    "state": lambda run, model, optimizer, loader, odd: setattr(run, "state", odd),
    "state of a checkpoint": lambda run, model, optimizer, loader, odd: (run.state.update(x=odd), run.save()),
}  # fmt: skip


def complaint(call: Callable[[], object]) -> str | None:
    """What is wrong with how the call ended: None when it worked or raised one sentence of ours."""
    try:
        call()
    except instep.InstepError as error:
        text = str(error)
        if not text.rstrip().endswith((".", "fit")) or len(text) > 700:
            return f"no sentence: {text}"
    except BaseException as error:  # noqa: BLE001  # whatever comes is what this looks for
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("argument", RUN_ARGUMENTS)
def test_arguments_of_run(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def open_and_close(odd: Any) -> None:
        with instep.Run(**{"global_batch": 4, argument: odd}):
            pass

    found = {name: complaint(lambda odd=odd: open_and_close(odd)) for name, odd in ODD.items()}
    assert not {name: text for name, text in found.items() if text is not None}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_of_methods(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {}
    for name, odd in ODD.items():
        folder = tmp_path / name.replace("/", "") if call in NEEDS_FOLDER else None
        with open_run(folder) as (run, model, optimizer, loader):
            found[name] = complaint(lambda odd=odd: CALLS[call](run, model, optimizer, loader, odd))
    assert not {name: text for name, text in found.items() if text is not None}


NEEDS_FOLDER = ("save(metric)", "save(best)", "restore(path)", "state of a checkpoint")


def test_every_method_is_in_the_table() -> None:
    """A new method or argument has to come with a row."""
    tried = {re.split(r"[( ]", name)[0] for name in CALLS}
    public = {name for name in vars(instep.Run) if not name.startswith("_")} | {
        "backward",
        "update",
        "reduce",
        "all_rows",
    }
    facts = {"rank", "world_size", "is_main", "device"}
    assert public - tried - facts == {"print"}  # takes what Python's print takes


@pytest.mark.parametrize(
    ("call", "odd", "text"),
    [
        ("export(path)", 5, "run.export got 5; it takes a path, a str or a pathlib.Path."),
        ("export(path)", "weights.pt", "run.export('weights.pt'): the name has to end in .safetensors"),
        ("export(path)", "/proc/x.safetensors", "the weights could not be exported to /proc/x.safetensors: "),
        ("restore(path)", 5, "run.restore got 5; it takes a path, a str or a pathlib.Path."),
        ("load_weights(path)", None, "run.load_weights got None; it takes a path"),
        ("load_weights(path)", "/usr", "/usr holds no weights that instep knows: "),
        ("load_weights(strict)", "yes", "run.load_weights(strict='yes'): strict has to be True or False."),
        ("export(model)", "m", "run.export(model='m'): model is one that run.prepare took, a torch.nn.Module."),
        ("sum(value)", "a", "run.sum got 'a'; it takes a number or a tensor, or a list of them, one per batch."),
        ("sum(value)", {"a": 1}, "run.sum got a dict; it takes a number or a tensor, or a list of them, one per batch. Give its"),
        ("mean(value)", "a", "run.mean got 'a'; it takes a number or a tensor"),
        ("mean(weight)", "x", "run.mean(weight='x'): the weight is the number of items that the value is a mean of"),
        ("sum(values)", torch.ones(3), "run.sum cannot add values of the shapes (2,) and (3,): give it one shape"),
        ("schedule(value)", "a", "run.schedule got 'a'; it takes the number to go by, such as run.mean(loss, weight)."),
        ("log(value)", [1], "run.log(x=...) got a list; it takes a number, a text, a bool, None or a tensor of one element."),
        ("log(value)", torch.tensor(1j), "run.log(x=...) got torch.complex64, which is no real number and no text."),
        ("log unnamed", {"loss": 1}, "run.log got a dict without a name: write run.log(name=value), or run.log(**metrics)"),
        ("gather(value)", threading.Lock(), "run.gather got a lock, which cannot be sent to other ranks: cannot pickle"),
        ("save(metric)", "a", "run.save got 'a'; it takes the metric as a number."),
        ("state", 5, "run.state got 5; it stays a dict: run.state['best'] = 0.9."),
        ("state of a checkpoint", LOOP, "run.state/x/0 holds itself, or is nested too deeply"),
        ("state of a checkpoint", object(), "run.state/x is a builtins.object, which a checkpoint cannot hold."),
        ("prepare(model)", nn.Linear(2, 1, device="meta"), "run.prepare got a Linear whose weight is on the meta device"),
        ("prepare(model)", nn.LazyLinear(1), "run.prepare got a LazyLinear whose weight has no shape yet"),
        ("prepare(sync_batch_norm)", "yes", "run.prepare(sync_batch_norm='yes'): sync_batch_norm has to be True or False."),
        ("backward(loss)", torch.tensor(1j, requires_grad=True), "step.backward got a complex loss (complex64)"),
        ("backward(weight)", torch.ones(3), "step.backward(weight=a Tensor of shape (3,) and type float32): the weight is"),
        ("loader(shuffle)", "yes", "run.loader(shuffle='yes'): shuffle has to be True or False."),
        ("loader(collate_fn)", 5, "run.loader(collate_fn=5): collate_fn is a function, or left out."),
        ("loader(multiprocessing_context)", "a", "multiprocessing_context='a' is no way to start processes here. Allowed: "),
        ("steps(loader)", 5, "run.steps got 5; it takes what run.loader(...) returns. Without data: run.steps(steps=5)."),
        ("evaluate(loader)", [1], "run.evaluate got a list; it takes what run.loader(...) returns."),
    ],
)  # fmt: skip
def test_the_sentence(call: str, odd: Any, text: str, tmp_path: Path) -> None:
    folder = tmp_path if call in NEEDS_FOLDER else None
    with open_run(folder) as parts, pytest.raises(instep.InstepError, match="^" + re.escape(text)):
        CALLS[call](*parts, odd)


def test_numpy_numbers_are_numbers() -> None:
    with instep.Run(global_batch=numpy.int64(4), clip_norm=numpy.float32(1.0), seed=numpy.int32(3)) as run:  # type: ignore[arg-type]
        assert len(run.loader(TensorDataset(torch.ones(8, 2)))) == 2
        assert run.mean(numpy.float32(2.0), weight=numpy.int64(3)) == 2.0

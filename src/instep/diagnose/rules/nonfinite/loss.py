"""The loss is not a number.

## What it sees
The first loss that is NaN or infinite, and what was finite at that moment: the batch, the parameters, each operation that keeps its inputs.

## Why it matters
From this step on every gradient and soon every parameter is NaN.

## What to do
It depends on what is named: a bad sample, a logarithm or division at 0, overflow in half precision, a learning rate that is too high.

## When it is wrong
Infinite losses that a loss scaler skips are not reported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.run_view import RunView, short
from instep.diagnose.slices import call_at, definitions
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding

GROWTH = 100.0  # a loss that has grown so much over its smallest recent value has diverged


def check(run: RunView) -> Iterator[Finding]:
    found = [(event.time, view, event) for view in run.ranks for event in view.named("nonfinite-loss")[:1]]
    if not found:
        return
    _, view, event = min(found, key=lambda row: (row[2].step, row[0]))
    here = view.site(event["site"])
    cause, fix, where, certainty = explain(event, here)
    yield Finding(
        id="nonfinite/loss",
        title=f"the loss became {event['value']} on rank {view.rank} in step {event.step + 1}",
        cause=cause,
        fix=fix,
        evidence=(
            view.cite(f"loss {event['value']} at {short(here)}, batch {event['batches']}; before it: {_last(event)}"),
        ),
        certainty=certainty,  # type: ignore[arg-type]
        ranks=(view.rank,) if event["batch"] else (),
        where=where,
        explains=("numbers/*",),
    )


def _last(event: Event) -> str:
    return ", ".join(f"{value:.4g}" for value in event["history"][-4:]) or "nothing"


def explain(event: Event, here: CallSite | None) -> tuple[str, tuple[str, ...], CallSite | None, str]:
    if event["batch"]:
        row = event["batch"][0]
        samples = f", samples {row['samples']} of the batch" if row["samples"] else ""
        return (
            f"The batch itself holds NaN or infinity (tensor {row['place']}{samples}).",
            ("mend or filter these samples in the data set",),
            here,
            "certain",
        )
    history = event["history"]
    diverged = len(history) >= 3 and min(history) > 0 and history[-1] > GROWTH * min(history)
    if diverged:
        return (
            f"The loss had grown from {min(history):.3g} to {history[-1]:.3g} before: training has diverged.",
            ("lower the learning rate, add warm-up, or clip gradients",),
            _rate_line(here) or here,
            "likely",
        )
    operation = event["operation"]
    if event["parameters"]:
        names = ", ".join(event["parameters"][:3])
        return (
            f"Parameters were not finite before this step: {names}. A gradient of the step before was not.",
            ("clip gradients, and look for a square root or norm whose derivative is infinite at 0",),
            here,
            "likely",
        )
    if operation is not None:
        where = find_operation(here, operation["name"]) or here
        return (
            f"{operation['why'][:1].upper()}{operation['why'][1:]} in {operation['name'].removesuffix('0').removesuffix('Backward')} at {short(where)}, with finite inputs and parameters.",
            (f"keep the argument away from there at {short(where)}: clamp it, or add a small number",),
            where,
            "certain",
        )
    return (
        "Batch and parameters were finite, so an operation in the forward or the loss made it.",
        ("run the step again under torch.autograd.detect_anomaly()",),
        here,
        "possible",
    )


def _rate_line(here: CallSite | None) -> CallSite | None:
    """Where the learning rate is given: the last call with `lr=` before the line, else the first."""
    source = load(here.file) if here else None
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)] if source else []
    given = [node for node in calls if any(word.arg == "lr" for word in node.keywords)]
    before = [node for node in given if here is not None and node.lineno < here.line]
    chosen = max(before, key=lambda node: node.lineno) if before else next(iter(given), None)
    return source.site(chosen) if source is not None and chosen is not None else None


def find_operation(here: CallSite | None, name: str) -> CallSite | None:
    """The operation in the user's source: along what the loss was made of first, then anywhere in the file."""
    source = load(here.file) if here else None
    if source is None or here is None:
        return None
    word = name.partition("Backward")[0].lower()
    call = call_at(source, here.line, "backward")
    loss = call.func.value if call is not None and isinstance(call.func, ast.Attribute) else None
    nodes = (
        [part for node in definitions(source, loss, source.function_at(here.line)) for part in ast.walk(node)]
        if loss
        else []
    )
    for node in (*nodes, *ast.walk(source.tree)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "").rstrip("_") == word:
            return source.site(node)
        if (
            word == "div"
            and isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and not isinstance(node.right, ast.Constant)
        ):
            return source.site(node)
        if word == "pow" and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return source.site(node)
    return None

"""Gradients that the script joins itself are a sum over the ranks, not a mean.

## What it sees
A gradient before the script's own all-reduce on each rank, and what the optimizer used: the sum. Nothing in the source divides by the
number of ranks or by a count that was joined over the ranks.

## Why it matters
Each rank's loss is a mean over its own batch. The sum of the gradients is as many times too large as there are ranks, which acts like a
learning rate that grows with the number of ranks.

## What to do
Divide by `dist.get_world_size()` after the all-reduce, or pass `op=dist.ReduceOp.AVG` where the backend has it.

## When it is wrong
A loss or a learning rate that was scaled for it in a way that is not seen in the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.plain_facts import plain_models
from instep.diagnose.run_view import RunView
from instep.diagnose.source import Source, load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding

MIN_EQUAL = 2  # steps in which the sum was used as it was
_TOLERANCE = 1e-3
_SIZE = re.compile(r"world|size|replica|rank|n_?gpu|n_?proc|num_proc|device_count|AVG", re.IGNORECASE)


def check(run: RunView) -> Iterator[Finding]:
    for model in plain_models(run):
        if not model.averaged or len(model.first_apart) == len(model.optimizer["names"]):
            continue
        number, where = model.optimizer["optimizer"], model.averaged_at
        rows = [[row for row in view.named("average-by-hand") if row["optimizer"] == number] for view in run.ranks]
        compared = [events for events in zip(*rows) if all(event["before"] and event["used"] for event in events)]
        summed = [events for events in compared if _is_sum(events)]
        if len(summed) < MIN_EQUAL or len(summed) < len(compared) or _is_scaled(where):
            continue
        yield _finding(run, summed[0], where)
        return


def _is_sum(events: tuple[Event, ...]) -> bool:
    """Whether every rank used the sum of what the ranks had."""
    for place, parts in enumerate(zip(*(event["before"] for event in events))):
        total, size = sum(parts), max(abs(part) for part in parts)
        if any(abs(event["used"][place] - total) > _TOLERANCE * max(size, abs(total)) for event in events):
            return False
    return any(any(event["before"]) for event in events)


def _is_scaled(where: CallSite | None) -> bool:
    """Whether the source divides or multiplies by something that speaks of the number of ranks, or by a joined count."""
    source = load(where.file) if where else None
    if source is None:
        return True
    joined = {
        argument.id
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("all_reduce", "reduce")
        for argument in node.args
        if isinstance(argument, ast.Name)
    }
    return any(_SIZE.search(text) or text in joined for text in _factors(source))


def _factors(source: Source) -> Iterator[str]:
    """What the source divides or multiplies by."""
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Mult)):
            parts = [node.right, node.left] if isinstance(node, ast.BinOp) else [node.value]
            yield from (ast.unparse(part) for part in parts)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("div", "div_", "mul", "mul_"):
            yield from (ast.unparse(part) for part in node.args)
        elif isinstance(node, ast.Attribute) and node.attr == "AVG":
            yield "AVG"


def _finding(run: RunView, events: tuple[Event, ...], where: CallSite | None) -> Finding:
    return Finding(
        id="numbers/sum-not-mean",
        title=f"the gradients that are used are sums over {run.world_size} ranks, not means",
        cause=f"The all-reduce at {short(where)} adds the gradients of all ranks, and nothing divides them before the step: they are {run.world_size} times as large as they should be.",
        fix=(f"divide by dist.get_world_size() after {short(where)}",),
        evidence=tuple(
            view.cite(
                f"step {event.step + 1}: an element of a gradient was {event['before'][0]:.4g} before, {event['used'][0]:.4g} when it was used"
            )
            for view, event in list(zip(run.ranks, events))[:4]
        ),
        certainty="likely",
        where=where,
    )

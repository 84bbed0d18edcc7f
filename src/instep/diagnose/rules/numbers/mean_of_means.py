"""The loss is a mean over tokens, and the ranks have very different numbers of them.

## What it sees
A loss that is a mean over targets and leaves some out (`ignore_index`, or a sum that is divided by the sum of a mask), whose number of
targets differs much between ranks in the same step.

## Why it matters
Each rank divides by its own count, and the gradients are averaged with equal weight: a token on a rank with few of them counts more. The result depends on how samples fall to ranks.

## What to do
Sum the loss, divide by the number of tokens over all ranks (an all-reduce), and multiply by the number of ranks, which the average divides by.

## When it is wrong
Small differences are common and not reported; a script may weigh on purpose.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator

from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import call_at, definitions, loss_of
from instep.diagnose.source import load
from instep.records.finding import CallSite, Finding

_LOSSES = ("cross_entropy", "nll_loss")
MIN_CALLS = 6
MIN_SPREAD = 0.25  # mean over steps of the counts' deviation over their mean; random lengths stay below


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2 or not all(wraps(view) for view in run.ranks):
        return
    counts: list[dict[int, tuple[int, int]]] = [
        {event["call"]: (event["valid"], event["total"]) for event in view.named("tokens")} for view in run.ranks
    ]
    calls = sorted({call for table in counts for call in table})
    rows = [[table[call][0] for table in counts] for call in calls if all(call in table for table in counts)]
    spreads = [statistics.pstdev(row) / statistics.mean(row) for row in rows if sum(row)]
    if len(spreads) < MIN_CALLS or sum(spreads) / len(spreads) < MIN_SPREAD:
        return
    view = run.ranks[0]
    first = view.named("tokens")[0]
    where = find_loss(view.site(first["site"]), divides=first["total"] is None)
    spread = sum(spreads) / len(spreads)
    yield Finding(
        id="numbers/mean-of-means",
        title=f"the loss is a mean over each rank's own targets, and their numbers deviate by {spread:.0%} between ranks",
        cause=f"The loss at {short(where)} leaves some targets out and divides by the rank's own count of the others; averaging the gradients then weighs tokens of ranks with few targets more.",
        fix=(
            f"at {short(where)} sum the loss, divide by the all-reduced number of targets and multiply by the number of ranks",
        ),
        evidence=tuple(
            one.cite(
                f"targets that count on rank {one.rank}: {', '.join(str(event['valid']) for event in one.named('tokens')[:6])}"
            )
            for one in run.ranks[:4]
        ),
        certainty="likely",
        where=where,
    )


def find_loss(backward: CallSite | None, divides: bool = False) -> CallSite | None:
    """The line that computes the loss of a backward: a call of a known name, else the nearest call that gave it. divides:
    a division by a count of its own makes it a mean."""
    source = load(backward.file) if backward else None
    loss = loss_of(call_at(source, backward.line, "backward")) if source and backward else None
    if source is None or backward is None or loss is None:
        return backward
    nodes = list(definitions(source, loss, source.function_at(backward.line)))
    calls = [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call)]
    if divides:
        parts = [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.BinOp)]
        made = [
            one for one in parts if isinstance(one.op, ast.Div) and not isinstance(one.right, (ast.Constant, ast.Name))
        ]
        if made:
            return source.site(made[0])
    known = [one for one in calls if getattr(one.func, "attr", getattr(one.func, "id", "")) in _LOSSES]
    given = [node for node in nodes if isinstance(node, ast.Call)]
    chosen = next(iter(known), None) or next(iter(given), None)
    return source.site(chosen) if chosen is not None else backward

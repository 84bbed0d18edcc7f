"""Every step searches for unused parameters, and there are none.

## What it sees
A model that the script wraps with `find_unused_parameters=True`, whose parameters all got a gradient in each of 20 backwards on all ranks.

## Why it matters
DistributedDataParallel walks the whole graph after every forward and sends one more all-reduce per step, to learn what it finds to be
nothing.

## What to do
Leave `find_unused_parameters=True` out.

## When it is wrong
A branch that is taken rarely. Then DistributedDataParallel says so in the step that leaves a parameter out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.diagnose.time_shares import measure_shares
from instep.records.finding import CallSite, Finding

EXTRA_SECONDS = 200e-6  # estimate: a small all-reduce on gloo (130 to 220 us) and a walk of the graph
MIN_SHARE = 0.01  # of a step


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2:
        return
    view = run.ranks[0]
    shares = measure_shares(view)
    for wrapper, event in wraps(view).items():
        rows = [row for one in run.ranks for row in one.named("used-parameters") if row["wrapper"] == wrapper]
        where = view.site(event["site"]) if event.get("by_user") else _asked_for(view.site(event["site"]))
        if not event["find_unused"] or where is None or len(rows) < run.world_size:
            continue
        step = shares.total_seconds / shares.steps if shares is not None else None
        if any(row["unused"] for row in rows) or step is None or MIN_SHARE * step > EXTRA_SECONDS:
            continue
        yield Finding(
            id="speed/needless-search",
            title=f"find_unused_parameters=True searches in every step, and all {rows[0]['of']} parameters are used",
            cause=f"The model wrapped at {short(where)} had a gradient for every parameter in {rows[0]['backwards']} backwards on all ranks; "
            "the search costs a walk of the graph and one more all-reduce per step.",
            fix=(
                f"leave find_unused_parameters=True out at {short(where)} (estimate: {EXTRA_SECONDS * 1e3:.1f} of {step * 1e3:.1f} ms per step, about {EXTRA_SECONDS / step:.0%})",
            ),
            evidence=tuple(
                one.cite(
                    f"rank {one.rank}: {row['of']} parameters, {row['unused']} without a gradient in {row['backwards']} backwards"
                )
                for one in run.ranks[:4]
                for row in one.named("used-parameters")
                if row["wrapper"] == wrapper
            ),
            certainty="certain",
            where=where,
        )
        return


def _asked_for(wrapped: CallSite | None) -> CallSite | None:
    """Where a script asks a training library for the search, which wraps the model for it."""
    source = load(wrapped.file) if wrapped is not None else None
    words = [node for node in ast.walk(source.tree) if isinstance(node, ast.keyword)] if source is not None else []
    asked = [word.value for word in words if word.arg in ("find_unused_parameters", "ddp_find_unused_parameters")]
    on = [value for value in asked if isinstance(value, ast.Constant) and value.value is True]
    return source.site(on[0]) if source is not None and on else None

"""A value that decides is computed from one rank's part of the evaluation set.

## What it sees
A set that a DistributedSampler shares out over the ranks, gone through without training; no collective of the script near that joins what
the ranks found; and a comparison of the result, as for the best model or for stopping.

## Why it matters
Each rank knows the score of its own part. What rank 0 calls the best model is best on 1/N of the set, and ranks that decide by
themselves decide differently.

## What to do
Sum counts (hits, samples, losses) over the ranks with `dist.all_reduce` before dividing, or give every rank the whole set.

## When it is wrong
An estimate that is meant as one. Metrics that join themselves, as torchmetrics and `gather_for_metrics` do, are silent.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.data_facts import loaders_by_key
from instep.diagnose.naming import short
from instep.diagnose.rules.numbers.evaluation_padding import evaluation_laps, scope_around
from instep.diagnose.run_view import RunView
from instep.diagnose.source import Source, load
from instep.records.finding import CallSite, Finding

MIN_PASSES = 2
_JOINS = ("reduce", "gather", "sync", "broadcast", "torchmetrics", "all_mean", "mean_over")


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2:
        return
    view = run.ranks[0]
    for key, event in loaders_by_key(view).items():
        laps = evaluation_laps(run, key) if event.get("replicas") == run.world_size else []
        passes = [lap for lap in view.named("lap") if lap["loader"] == event["loader"] and lap["exhausted"]]
        loop = view.site(laps[0]["site"]) if laps else None
        used = _decides(loop) if len(passes) >= MIN_PASSES else None
        if loop is None or used is None:
            continue
        share = laps[0]["samples"]
        yield Finding(
            id="numbers/metric-of-one-rank",
            title=f"a decision is made by what one rank finds on its part of the evaluation set ({share} of {event['length']} samples)",
            cause=f"The loop at {short(loop)} goes through this rank's part only, nothing joins the ranks' results, and {short(used)} compares what came out.",
            fix=(f"sum counts over the ranks with dist.all_reduce after the loop at {short(loop)}, then divide",),
            evidence=tuple(
                one.cite(f"rank {one.rank}: {lap['samples']} samples of {event['length']}")
                for one, lap in list(zip(run.ranks, laps))[:4]
            ),
            certainty="possible",
            where=loop,
        )
        return


def _decides(loop: CallSite | None) -> CallSite | None:
    """Where the result of the evaluation is compared; None when something joins the ranks' results anywhere in the file."""
    source = load(loop.file) if loop is not None else None
    if source is None or loop is None or _joins(source):
        return None
    name = getattr(source.function_at(loop.line), "name", None)
    results = {
        target.id
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and name is not None
        and name == getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for part in scope_around(source, loop.line):
        for node in ast.walk(part):
            is_choice = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("max", "min")
            if (is_choice or isinstance(node, ast.Compare)) and results & {
                one.id for one in ast.walk(node) if isinstance(one, ast.Name)
            }:
                return source.site(node)
    return None


def _joins(source: Source) -> bool:
    words = [getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))) for node in ast.walk(source.tree)]
    return any(isinstance(word, str) and any(join in word for join in _JOINS) for word in words)

"""Evaluation counts some samples twice.

## What it sees
A set gone through without training, of which the ranks together got more samples than it has, by a script that joins what they found.
A DistributedSampler does so when the ranks do not divide the length.

## Why it matters
The sampler repeats samples from its beginning until every rank has equally many. Sums and counts over all ranks then hold these samples
twice: the accuracy depends on the number of ranks, and no longer belongs to the set.

## What to do
Give each rank its own part without repeats, `Subset(dataset, range(rank, len(dataset), world_size))`, and call the inner model
(`model.module`) in the loop, since the ranks then have different numbers of batches. Or gather the predictions and cut them to `len(dataset)`.

## When it is wrong
Scripts that drop the repeated samples after gathering in a way that is not seen in their source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.data_facts import Key, laps_by_key, loaders_by_key
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.source import Source, load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding

MIN_SHARE = 0.001  # of the samples: fewer repeats are no fault worth a word
MAX_SHARE = 0.5  # more is no padding: every rank goes through the whole set
_JOINS = (
    "all_reduce",
    "all_gather",
    "gather",
    "reduce",
    "all_gather_object",
    "gather_object",
    "all_gather_into_tensor",
)


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2:
        return
    view = run.ranks[0]
    for key, event in loaders_by_key(view).items():
        laps = evaluation_laps(run, key)
        length = event["length"] or 0
        twice = sum(lap.get("samples", 0) for lap in laps) - length
        loop = view.site(laps[0]["site"]) if laps else None
        if loop is None or not MIN_SHARE * length < twice < MAX_SHARE * length or not _adds_up(loop):
            continue
        yield _finding(run, laps, length, view.site(event.get("sampler_site")) or view.site(event["site"]), loop)
        return


def evaluation_laps(run: RunView, key: Key) -> list[Event]:
    """The first whole pass of each rank over a loader that was never trained from; empty unless all ranks had one."""
    found: list[Event] = []
    for view in run.ranks:
        rows = [lap for (place, _), lap in laps_by_key(view).items() if place == key]
        whole = [lap for lap in rows if lap["exhausted"]]
        if not whole or any(lap["backwards"] for lap in rows) or not view.num_steps:
            return []
        found.append(whole[0])
    return found


def _adds_up(loop: CallSite) -> bool:
    """Whether the script joins results of the ranks near the loop, and nowhere cuts a list to the length of a set."""
    source = load(loop.file)
    if source is None:
        return False
    scope = scope_around(source, loop.line)
    joins = any(isinstance(node, ast.Call) and _name(node) in _JOINS for part in scope for node in ast.walk(part))
    return joins and not any(_cuts(node) for node in ast.walk(source.tree))


def scope_around(source: Source, line: int) -> list[ast.AST]:
    """The function of the loop, those it calls, and those that call it."""
    function = source.function_at(line)
    name = getattr(function, "name", None)
    called = {_name(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
    inner = [one for one in source.functions() if one.name in called]
    callers = [
        one
        for one in source.functions()
        if name and any(isinstance(node, ast.Call) and _name(node) == name for node in ast.walk(one))
    ]
    top = [source.tree] if isinstance(function, ast.Module) else []
    return [function, *inner, *callers, *top]


def _name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _cuts(node: ast.AST) -> bool:
    """`rows[: len(dataset)]`, `rows[:total]` and the like; `gather_for_metrics` cuts by itself."""
    if isinstance(node, ast.Attribute):
        return node.attr == "gather_for_metrics"
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice) or node.slice.upper is None:
        return False
    upper = ast.unparse(node.slice.upper)
    return node.slice.lower is None and any(
        word in upper for word in ("len(", "num_samples", "total", "dataset", "num_")
    )


def _finding(run: RunView, laps: list[Event], length: int, where: CallSite | None, loop: CallSite) -> Finding:
    total = sum(lap["samples"] for lap in laps)
    return Finding(
        id="numbers/evaluation-padding",
        title=f"evaluation counts {total - length} of {length} samples twice",
        cause=f"The loader or sampler made at {short(where)} fills up {length} samples to {total}, so that {run.world_size} ranks get equally many, "
        f"and what the loop at {short(loop)} counts is joined over the ranks.",
        fix=(
            "share the set out without repeats: Subset(dataset, range(rank, len(dataset), world_size)), with model.module in the loop",
            f"or gather the predictions and cut them to the first {length} (with Accelerate: gather_for_metrics)",
        ),
        evidence=tuple(
            view.cite(f"rank {view.rank}: {lap['samples']} samples in {lap['batches']} batches, of a set of {length}")
            for view, lap in zip(run.ranks[:4], laps)
        ),
        certainty="likely",
        where=where,
    )

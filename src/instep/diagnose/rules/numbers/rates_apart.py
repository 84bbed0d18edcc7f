"""The ranks use different learning rates.

## What it sees
The learning rate at the end of the same optimizer step, on ranks that share a wrapped model.

## Why it matters
Equal gradients and different rates give different parameters. A usual cause is a scheduler that is fed with each rank's own validation value.

## What to do
All-reduce the value before it goes to the scheduler.

## When it is wrong
Different optimizers whose steps interleave differently on the ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.model_facts import same_group, wraps
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2:
        return
    for wrapper in list(wraps(run.ranks[0]))[:1]:
        members = same_group(run, wrapper)
        joins = any(view.named("join") for view in members)
        found = _first_difference(run) if len(members) == len(run.ranks) and not joins else None
        if found is None:
            return
        step, rates, equal_at = found
        fed = _scheduler(run)
        where = fed or find_assignment(_step_site(run)) or (_made_at(run) if step == 1 else None)
        yield Finding(
            id="numbers/rates-apart",
            title=f"the ranks use different learning rates {_since(step, equal_at)}: {', '.join(f'{rate:.3g}' for rate in rates.values())}",
            cause=f"The scheduler at {short(where)} was fed with a value that each rank computed for itself."
            if fed
            else f"What {short(where)} sets the rate to differs between ranks."
            if where
            else "The schedules of the ranks have parted.",
            fix=("all-reduce the value that decides about the rate before it is used",),
            evidence=tuple(
                run.by_rank[rank].cite(f"step {step}: learning rate {rate:.6g}", "page.bin")
                for rank, rate in rates.items()
            ),
            certainty="certain",
            where=where,
            explains=("numbers/ranks-apart",),
        )


def _since(step: int, equal_at: int) -> str:
    """equal_at: the newest step before in which they were seen to be equal; of short steps only some are compared."""
    return (
        f"from step {step} on"
        if equal_at + 1 >= step or not equal_at
        else f"since a step between {equal_at} and {step}"
    )


def _first_difference(run: RunView) -> tuple[int, dict[int, float], int] | None:
    pages = {view.rank: view.page for view in run.ranks if view.page is not None}
    tables = [set(page.counts_by_step()) for page in pages.values()]
    equal_at = 0
    for step in sorted(tables[0].intersection(*tables[1:])):
        marks = {rank: page.step_mark(step) for rank, page in pages.items()}
        rates = {rank: mark.rate for rank, mark in marks.items() if mark is not None}
        if len(rates) == len(pages) and max(rates.values()) - min(rates.values()) > 1e-6 * max(rates.values()):
            return step, rates, equal_at
        equal_at = step
    return None


def _scheduler(run: RunView) -> CallSite | None:
    """Where ReduceLROnPlateau was given values that differ between ranks."""
    rows = [view.named("plateau") for view in run.ranks]
    for events in zip(*rows):
        if len({event["value"] for event in events}) > 1:
            return run.ranks[0].site(events[0]["site"])
    return None


def _made_at(run: RunView) -> CallSite | None:
    """Where the optimizer was made, of rates that were never equal."""
    made = run.ranks[0].named("optimizer")
    return run.ranks[0].site(made[0]["site"]) if made else None


def _step_site(run: RunView) -> CallSite | None:
    view = run.ranks[0]
    mark = view.page.newest_step_mark if view.page else None
    return view.site(mark.site) if mark is not None else None


def find_assignment(step: CallSite | None) -> CallSite | None:
    """Where a script sets `group["lr"]` itself."""
    source = load(step.file) if step else None
    for node in ast.walk(source.tree) if source else ():
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if (
                isinstance(target, ast.Subscript)
                and isinstance(target.slice, ast.Constant)
                and target.slice.value == "lr"
            ):
                return source.site(node) if source else None
    return None

"""A backward passed by some parameters, and DistributedDataParallel waits for their gradients.

## What it sees
The error "Expected to have finished reduction in the prior iteration", the names behind the indices in it, and the line that decides
whether the module is called.

## Why it matters
DistributedDataParallel averages a bucket when all gradients in it are there. A module that was not called gives none.

## What to do
Pass `find_unused_parameters=True`, or call the module on every rank (decide with a random number that all ranks share).

## When it is wrong
When parameters are unused for another reason than the branch that is named, as an output that no loss uses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from instep.diagnose.branches import conditions_of
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    found = run.events("unused-parameters")
    if not found:
        return
    ranks = tuple(sorted(found))
    event = found[ranks[0]][-1]
    if event["replaced"]:
        yield _replaced(run, ranks[0], event)
        return
    child, where, guarded = find_call(event)
    names = ", ".join(event["names"][:6]) + ("..." if len(event["names"]) > 6 else "")
    some = len(ranks) < run.world_size
    yield Finding(
        id="crash/unused-parameters",
        title=f"{child or 'parameters'} got no gradient on {'rank ' + str(ranks[0]) if some else 'any rank'} in the last step: {names}",
        cause=(
            f"Whether {child} is called is decided at {short(where)}"
            + (", by each rank for itself" if some else "")
            + ". "
            if guarded
            else ""
        )
        + "DistributedDataParallel waits for a gradient of every parameter and got none for these.",
        fix=(
            "pass find_unused_parameters=True to DistributedDataParallel",
            f"or make {short(where)} come out the same on every rank and use every module"
            if guarded
            else "or use every parameter in the loss",
        ),
        evidence=(run.by_rank[ranks[0]].cite(f"no gradient for indices {event['indices']}: {names}"),),
        certainty="certain",
        ranks=ranks if some else (),
        where=where,
        explains=("crash/*", "hang/*", "numbers/*"),
    )


def _replaced(run: RunView, rank: int, event: Event) -> Finding:
    """The wrapper still waits for parameters that are no longer in the model."""
    view = run.by_rank[rank]
    made = view.site(event["site"])
    where = find_replacement(made) or made
    names = ", ".join(event["replaced"][:6])
    return Finding(
        id="crash/unused-parameters",
        title=f"parameters were replaced after the model was wrapped: {names}",
        cause=f"DistributedDataParallel, built at {short(made)}, waits for gradients of the parameters it found then; {short(where)} put others in their place.",
        fix=(f"make the change at {short(where)} before the model is wrapped",),
        evidence=(view.cite(f"not among the wrapped parameters: {names}"),),
        certainty="certain",
        where=where,
        explains=("crash/*", "hang/*", "numbers/*"),
    )


def find_replacement(made: CallSite | None) -> CallSite | None:
    """After the line that wraps, an assignment to a part of the inner model."""
    source = load(made.file) if made else None
    for node in ast.walk(source.tree) if source and made else ():
        if source and made and isinstance(node, ast.Assign) and node.lineno > made.line:
            replaced = [target for target in node.targets if ".module" in ast.unparse(target)]
            if replaced:
                return source.site(node)
    return None


def find_call(event: Event) -> tuple[str | None, CallSite | None, bool]:
    """The module that was left out, and the condition around its call or, without one, the call itself."""
    fallback: tuple[str | None, CallSite | None, bool] = (None, None, False)
    for owner in event["owners"]:
        for row in event["classes"]:
            if row["class"].rpartition(".")[2] != owner["class"].rpartition(".")[2]:
                continue
            for site, guarded in _calls(row, owner["child"]):
                if guarded:
                    return owner["path"], site, True
                fallback = fallback if fallback[1] else (owner["path"], site, False)
            made = _made_at(row, owner["child"])
            fallback = fallback if fallback[1] else (owner["path"], made, False)
    return fallback


def _made_at(row: dict[str, Any], child: str) -> CallSite | None:
    """Where the class makes the child."""
    source = load(row["file"])
    for node in ast.walk(source.tree) if source else ():
        if source and isinstance(node, ast.Assign) and row["line"] <= node.lineno <= row["last"]:
            made = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
            if child in made:
                return source.site(node)
    return None


def _calls(row: dict[str, Any], child: str) -> Iterator[tuple[CallSite, bool]]:
    source = load(row["file"])
    if source is None:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == child and row["line"] <= node.lineno <= row["last"]:
            if isinstance(node.ctx, ast.Store) or source.function_at(node.lineno).__dict__.get("name") == "__init__":
                continue
            inline = next((one for one in source.ancestors(node) if isinstance(one, ast.IfExp)), None)
            guard = inline or next((one for one, _ in conditions_of(source, node.lineno)), None)
            yield source.site(guard or node), guard is not None

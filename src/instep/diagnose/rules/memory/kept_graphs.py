"""Losses are kept together with the graphs that made them.

## What it sees
Memory that grows, and a variable of the script that holds more tensors with graphs each time it is looked at, over several optimizer steps.

## Why it matters
A tensor that was computed from parameters keeps everything that backward would need. A list of such losses keeps all of it for every step.

## What to do
Keep `loss.item()` or `loss.detach()`; evaluate under `torch.no_grad()`.

## When it is wrong
Losses that are kept for a backward over many steps, as in some recurrent or reinforcement training.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding
from instep.units import format_bytes

_INDEX = re.compile(r"\[[^\]]*\]")  # of a place inside a container
_GROWS = ("append", "extend", "add", "insert", "appendleft")


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        events = view.named("kept-graphs")
        if not events:
            continue
        event = events[0]
        where = find_growth(event) or CallSite(event["file"], event["line"], source_line(event["file"], event["line"]))
        name, _, what = event["name"].partition(" (")  # what: "operations)" where the length of one graph was counted
        yield Finding(
            id="memory/kept-graphs",
            title=f"memory has grown by {format_bytes(event['growth'])}: {name} keeps {'the graphs of all steps' if what else 'results together with their graphs'}",
            cause=_cause(event, name, bool(what), where),
            fix=(
                f"keep .item() or .detach() at {short(where)}",
                "compute what is only kept or shown under torch.no_grad()",
            ),
            evidence=tuple(
                view.cite(
                    f"after step {step}: {count} {'operations behind' if what else 'results with graphs in'} {name}"
                )
                for step, count in event["history"][:4]
            ),
            certainty="certain",
            where=where,
        )
        return


def _cause(event: Event, name: str, is_one_graph: bool, where: CallSite | None) -> str:
    (first, few), (last, many) = event["history"][0], event["history"][-1]
    if is_one_graph:
        return (
            f"{name} in {event['function']} is computed from its own last value at {short(where)} with gradients switched on: the graph behind it had "
            f"{few} operations after step {first} and {many} after step {last}, each with what its backward would need."
        )
    return (
        f"{name} in {event['function']} held {few} results with their graphs after step {first} and {many} after step {last} "
        f"({short(where)}); each keeps all that its backward would need."
    )


def find_growth(event: Event) -> CallSite | None:
    """The line that puts the results there: growth of the container, or an addition to the running sum."""
    source = load(event["file"])
    name = _INDEX.sub("", event["name"].partition(" (")[0])
    attribute = name.rpartition(".")[2] if "." in name else None  # an object's own, named otherwise in its class
    for node in ast.walk(source.tree) if source else ():
        target = _grown_by(node)
        same = target is not None and (target == name or (attribute and target.rpartition(".")[2] == attribute))
        same = same or _made_of_itself(node, name, attribute)
        if source is not None and same:
            return source.site(node)
    return None


def _grown_by(node: ast.AST) -> str | None:
    """What a statement or call makes larger, without an index."""
    grown: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROWS:
        grown = node.func.value
    elif isinstance(node, ast.AugAssign):
        grown = node.target
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        grown = node.targets[0].value
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        first = ast.unparse(node.targets[0])
        grown = node.targets[0] if first == ast.unparse(node.value.left) else None
    return ast.unparse(grown).partition("[")[0] if grown is not None else None


def _made_of_itself(node: ast.AST, name: str, attribute: str | None) -> bool:
    """`logits, state = model(batch, state)`: what it is assigned is computed with it."""
    if not isinstance(node, ast.Assign):
        return False
    targets = [part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    named = {ast.unparse(target).partition("[")[0] for target in targets}
    used = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, (ast.Name, ast.Attribute))}
    ends = {one for one in named & used if one == name or (attribute and one.rpartition(".")[2] == attribute)}
    return bool(ends)

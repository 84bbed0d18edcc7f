"""A list of tensors only grows.

## What it sees
A variable of the script that holds more bytes of tensors or arrays each time it is looked at, over several optimizer steps, while memory
grows.

## Why it matters
What is kept for every step fills memory sooner or later, however small a step's share is.

## What to do
Keep numbers (`.item()`), sums, or a `deque(maxlen=...)`; write what has to be kept to a file; clear the list after each epoch.

## When it is wrong
A buffer that is to hold everything, as a replay buffer that is still filling, or features that are gathered once. Nothing is said of a cache
that may hold each sample of the data set once, of what stopped growing long before the end, and of what the script compares in length or
takes from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.memory.kept_graphs import find_growth
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding
from instep.units import format_bytes

MIN_PLACE = 0.5  # of all steps: it still grew after so many of them
_TAKES = ("clear", "pop", "popleft", "popitem")


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        newest = {event["name"]: event for event in view.named("kept-tensors") if not view.named("kept-graphs")}
        events = [event for event in newest.values() if _still_grows(view, event) and not _has_bound(event)]
        if not events:
            continue
        event = events[0]
        where = find_growth(event) or CallSite(event["file"], event["line"], source_line(event["file"], event["line"]))
        (first, few, _), (last, many, held) = event["history"][0], event["history"][-1]
        yield Finding(
            id="memory/kept-tensors",
            title=f"{event['name']} has grown by {format_bytes(event['growth'])} and holds {format_bytes(held)} in {many} tensors",
            cause=f"{event['name']} in {event['function']} held {few} tensors after step {first} and {many} after step {last}; {short(where)} adds to it, and nothing takes away.",
            fix=(
                f"keep numbers or sums instead at {short(where)}",
                "or a deque(maxlen=...), or clear it after each epoch",
            ),
            evidence=tuple(
                view.cite(f"after step {step}: {count} tensors, {format_bytes(size)}")
                for step, count, size in event["history"][:4]
            ),
            certainty="possible",
            where=where,
        )
        return


def _still_grows(view: RankView, event: Event) -> bool:
    """Not a cache of the data set's samples on its way to hold them all, and not full since long."""
    lengths = [row["length"] for row in view.named("loader") if row["length"]]
    is_cache = _is_in_data_set(find_growth(event)) and event["history"][-1][1] <= max(lengths, default=0)
    return not is_cache and event["history"][-1][0] >= MIN_PLACE * view.num_steps


def _is_in_data_set(where: CallSite | None) -> bool:
    """Whether a line is in a class that gives samples by their number."""
    source = load(where.file) if where is not None else None
    for node in ast.walk(source.tree) if source is not None else ():
        if isinstance(node, ast.ClassDef) and where is not None and node.lineno <= where.line <= (node.end_lineno or 0):
            return any(getattr(part, "name", "") == "__getitem__" for part in node.body)
    return False


def _has_bound(event: Event) -> bool:
    """Whether the source asks for its length in a comparison, or takes from it."""
    source = load(event["file"])
    last = event["name"].rpartition(".")[2].partition("[")[0]
    for node in ast.walk(source.tree) if source else ():
        if isinstance(node, ast.Compare):
            calls = [
                part for part in ast.walk(node) if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "len"
            ]
            if any(ast.unparse(call.args[0]).rpartition(".")[2] == last for call in calls if call.args):
                return True
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _TAKES:
            if ast.unparse(node.func.value).rpartition(".")[2].partition("[")[0] == last:  # type: ignore[attr-defined]
                return True
        elif isinstance(node, ast.Delete) and any(last in ast.unparse(target) for target in node.targets):
            return True
    return False

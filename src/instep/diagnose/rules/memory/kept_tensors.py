"""A list of tensors only grows.

## What it sees
A variable of the script that holds more bytes of tensors or arrays each time it is looked at, over several optimizer steps, while memory
grows.

## Why it matters
What is kept for every step fills memory sooner or later, however small a step's share is.

## What to do
Keep numbers (`.item()`), sums, or a `deque(maxlen=...)`; write what has to be kept to a file; clear the list after each epoch.

## When it is wrong
A buffer that is to hold everything, as a replay buffer that is still filling, or features that are gathered once.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.naming import short
from instep.diagnose.rules.memory.kept_graphs import find_growth
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding
from instep.units import format_bytes


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        events = [event for event in view.named("kept-tensors") if not view.named("kept-graphs")]
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

"""Every worker of every rank holds a copy of the data set's lists.

## What it sees
The memory that each worker of a data loader has for itself, which grows as it reads, beside long lists of Python objects in the data set.

## Why it matters
A forked worker shares the pages of its parent until one of them is written to. Python writes to an object whenever it is looked at, since
it counts references: page by page the whole list is copied, in each worker of each rank.

## What to do
Keep what is long in one array instead of many objects: numpy or torch tensors, a numpy array of fixed-size strings, an Arrow table, or a
file that is mapped. Their data have no counts in them and stay shared.

## When it is wrong
Workers that rightly hold much of their own, as a cache or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.diagnose.data_facts import loaders_by_key
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Finding
from instep.units import format_bytes

MIN_LIST_BYTES = 64 << 20  # less is not worth a word
MIN_GROWTH_BYTES = 24 << 20  # of one worker's own memory, while it reads
MIN_LOOKS = 3


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        for loader in {event["loader"] for event in view.named("worker-memory")}:
            events = [event for event in view.named("worker-memory") if event["loader"] == loader]
            largest = max(events[-1]["listed"], key=lambda row: row["bytes"])
            own = [max(event["private"]) for event in events]
            grows = len(own) >= MIN_LOOKS and own == sorted(own) and own[-1] - own[0] >= MIN_GROWTH_BYTES
            if grows and largest["bytes"] >= MIN_LIST_BYTES:
                yield _finding(run, view, events, largest)
                return


def _finding(run: RunView, view: RankView, events: list[Event], largest: dict[str, Any]) -> Finding:
    event = events[-1]
    loader = next((row for row in loaders_by_key(view).values() if row["loader"] == event["loader"]), None)
    where = view.site(loader["site"]) if loader is not None else None
    kind = loader["dataset"] if loader is not None else "the data set"
    workers, before, now = len(event["private"]), max(events[0]["private"]), max(event["private"])
    everywhere = largest["bytes"] * workers * run.world_size
    return Finding(
        id="memory/data-set-copied",
        title=f"the data loader's workers copy {kind}.{largest['name']}: each has grown from {format_bytes(before)} to {format_bytes(now)} of its own",
        cause=f"{kind}.{largest['name']} holds {largest['length']} Python objects (about {format_bytes(largest['bytes'])}); looking at them counts "
        f"references, which copies their pages into each of {workers * run.world_size} workers: up to {format_bytes(everywhere)} in all.",
        fix=(
            f"keep {largest['name']} in one numpy array or tensor, or in a file that is mapped",
            "or use fewer workers",
        ),
        evidence=tuple(
            view.cite(
                f"after step {one.step}: private memory of the workers of rank {view.rank}: {', '.join(format_bytes(size) for size in one['private'])}"
            )
            for one in (events[0], event)
        ),
        certainty="likely",
        where=where,
    )

"""Every worker of every rank holds a copy of the data set's lists.

## What it sees
The memory that each worker of a data loader has for itself, beside long lists of Python objects in the data set.

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

from instep.diagnose.data_facts import loaders_by_key
from instep.diagnose.run_view import RankView, RunView, short
from instep.records.event import Event
from instep.records.finding import Finding
from instep.units import format_bytes

MIN_BYTES = 64 << 20  # of one worker
MIN_SHARE = 0.4  # of the lists' bytes, that a worker has for itself


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        for event in reversed(view.named("worker-memory")):
            largest = max(event["listed"], key=lambda row: row["bytes"])
            if (
                max(event["private"], default=0) >= max(MIN_BYTES, MIN_SHARE * largest["bytes"])
                and largest["bytes"] >= MIN_BYTES
            ):
                yield _finding(run, view, event, largest)
                return


def _finding(run: RunView, view: RankView, event: Event, largest: dict[str, object]) -> Finding:
    loader = next((row for row in loaders_by_key(view).values() if row["loader"] == event["loader"]), None)
    where = view.site(loader["site"]) if loader is not None else None
    kind = loader["dataset"] if loader is not None else "the data set"
    each, workers = sum(event["private"]) / len(event["private"]), len(event["private"])
    total = each * workers * run.world_size
    return Finding(
        id="memory/data-set-copied",
        title=f"each data loader worker holds {format_bytes(each)} of its own, {format_bytes(total)} over {workers * run.world_size} workers",
        cause=f"{kind}.{largest['name']} is a list of {largest['length']} Python objects (about {format_bytes(float(str(largest['bytes'])))}); "
        "looking at them counts references, which copies their pages into each worker.",
        fix=(
            f"keep {largest['name']} in one numpy array or tensor, or in a file that is mapped",
            "or use fewer workers",
        ),
        evidence=(
            view.cite(
                f"private memory of the workers of rank {view.rank}: {', '.join(format_bytes(one) for one in event['private'])}; loader made at {short(where)}"
            ),
        ),
        certainty="likely",
        where=where,
    )

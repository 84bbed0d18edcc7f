"""Most of the time goes into waiting for batches.

## What it sees
The share of the time of a step that each rank waits in its data loader.

## Why it matters
The devices stand still meanwhile.

## What to do
Let worker processes read ahead: `num_workers=`, `persistent_workers=True`; make the transformation cheaper; store the data in a form that reads faster.

## When it is wrong
A first, slow pass over cold files; the first five steps are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.data_facts import loaders_by_key
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.time_shares import Shares, measure_shares
from instep.records.event import Event
from instep.records.finding import Finding

MIN_SHARE = 0.5
MIN_SECONDS = 1.5  # less is not worth a word


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, shares) for view in run.ranks if (shares := measure_shares(view)) is not None]
    slow = [(view, shares) for view, shares in found if shares.data > MIN_SHARE and shares.data_seconds > MIN_SECONDS]
    if not slow or len(slow) < len(run.ranks):
        return
    view, shares = slow[0]
    loader = _slowest(view)
    where = view.site(loader["site"]) if loader is not None else None
    workers = loader["workers"] if loader is not None else 0
    yield Finding(
        id="speed/input-bound",
        title=f"{shares.data:.0%} of the time goes into waiting for batches",
        cause=f"The loader made at {short(where)} has {'no worker processes: batches are made in the rank itself' if not workers else f'{workers} worker processes, which do not keep up'}.",
        fix=(_what_to_do(workers, shares),),
        evidence=tuple(
            one.cite(
                f"rank {one.rank}: {row.data_seconds:.1f} s of {row.total_seconds:.1f} s in the data loader", "page.bin"
            )
            for one, row in slow[:4]
        ),
        certainty="certain",
        where=where,
    )


def _what_to_do(workers: int, shares: Shares) -> str:
    gain = 1 / max(0.05, 1 - shares.data)
    first = (
        "pass num_workers=2 or more"
        if not workers
        else f"pass more than num_workers={workers}, or make a sample cheaper"
    )
    return f"{first}, with persistent_workers=True (up to {gain:.1f} times as fast when reading keeps up)"


def _slowest(view: RankView) -> Event | None:
    trained = [lap["loader"] for lap in view.named("lap") if lap["backwards"]]
    rows = list(loaders_by_key(view).values())
    return next((row for row in rows if row["loader"] in trained), rows[0] if rows else None)

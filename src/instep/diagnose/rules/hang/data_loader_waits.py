"""A rank waits for a batch that does not come.

## What it sees
The main thread of one rank is in the data loader for as long as `--stall-after` says, and the others wait for it in a collective.

## Why it matters
The data set is slow or stuck at this batch on this rank: a file server, a download, a sample that loops.

## What to do
Look at the line that is named: it is where the worker, or the rank itself, is reading.

## When it is wrong
A first batch that is slow by nature (a big index, a cold cache).
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions
from instep.diagnose.naming import short
from instep.diagnose.outside import find_stuck
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    found = find_stuck(run, "data-loader-waits")
    if found is None:
        return
    stuck = found.stuck
    here = short(stuck.here)
    yield Finding(
        id="hang/data-loader-waits",
        title=f"{found.names} {found.verb} waiting for a batch at {here} {found.consequence}",
        cause="The batch does not come" + (f"; its worker is at {short(stuck.cause_at)}." if stuck.cause_at else "."),
        fix=(f"look at {short(stuck.cause_at or stuck.here)}: what is read there, and from where",),
        evidence=cite_positions(run, found.positions),
        certainty=found.certainty,
        ranks=found.ranks,
        where=stuck.cause_at or stuck.here,
    )

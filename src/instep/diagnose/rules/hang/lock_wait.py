"""A rank waits for a lock or a queue.

## What it sees
The main thread of one rank waits in `acquire`, `join`, `get` or `wait`, and the others wait for it in a collective.

## Why it matters
What would release it does not come.

## What to do
Look at the line that is named and at the thread that should release it.

## When it is wrong
A wait that ends by itself, as for a background save.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions
from instep.diagnose.naming import short
from instep.diagnose.outside import find_stuck
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    found = find_stuck(run, "lock-wait")
    if found is None:
        return
    stuck = found.stuck
    here = short(stuck.here)
    yield Finding(
        id="hang/lock-wait",
        title=f"{found.names} {found.verb} waiting for a lock at {here} {found.consequence}",
        cause=f"The main thread waits for {stuck.detail}; what would release it does not come.",
        fix=(f"look at {here}, and at who should release it",),
        evidence=cite_positions(run, found.positions),
        certainty=found.certainty,
        ranks=found.ranks,
        where=stuck.cause_at or stuck.here,
    )

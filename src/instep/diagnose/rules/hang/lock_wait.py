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

from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.outside import explain_outside
from instep.diagnose.run_view import RunView, short
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "rank-stuck-outside":
        return
    stuck = explain_outside(run, hang.outside[0])
    if stuck.kind != "lock-wait":
        return
    rank = stuck.position.rank
    yield Finding(
        id="hang/lock-wait",
        title=f"rank {rank} waits for a lock at {short(stuck.here)}",
        cause=f"The main thread of rank {rank} waits for {stuck.detail}; what would release it does not come.",
        fix=(f"look at {short(stuck.here)}, and at who should release it",),
        evidence=cite_positions(run, hang.outside + hang.waiting),
        certainty="possible",
        ranks=(rank,),
        where=stuck.cause_at or stuck.here,
    )

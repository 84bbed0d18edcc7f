"""A rank is busy elsewhere while the others wait for it.

## What it sees
One rank is in no collective and has made no progress for as long as `--stall-after` says; the others wait in one.

## Why it matters
It may be an endless loop or work that only this rank does. Nobody can tell from outside whether it ends.

## What to do
Look at the line that is named. Work that is long by nature is done before the ranks meet, or on all of them.

## When it is wrong
Long work on one rank that will end: that is why it is never called more than possible.
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
    if stuck.kind != "rank-stuck-outside":
        return
    rank = stuck.position.rank
    yield Finding(
        id="hang/rank-stuck-outside",
        title=f"rank {rank} is at {short(stuck.here)} while the others wait for it",
        cause=f"Rank {rank} has not come back to the collectives of the others; it is at {short(stuck.here)}.",
        fix=(f"look at {short(stuck.here)}: does it end, and has only this rank to do it?",),
        evidence=cite_positions(run, hang.outside + hang.waiting),
        certainty="possible",
        ranks=(rank,),
        where=stuck.cause_at or stuck.here,
    )

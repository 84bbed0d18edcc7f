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

from instep.diagnose.hang import cite_positions
from instep.diagnose.naming import short
from instep.diagnose.outside import find_stuck
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    found = find_stuck(run, "rank-stuck-outside")
    if found is None:
        return
    stuck = found.stuck
    here = short(stuck.here)
    yield Finding(
        id="hang/rank-stuck-outside",
        title=f"{found.names} {found.verb} at {here} {found.consequence}",
        cause=f"Since then nothing was seen of {found.names}: no collective, batch, forward or step, and no file read or "
        f"written. What it does at {here} has not come to an end.",
        fix=(f"look at {here}: does it end, and who has to do it?",),
        evidence=cite_positions(run, found.positions),
        certainty=found.certainty,
        ranks=found.ranks,
        where=stuck.cause_at or stuck.here,
    )

"""A rank holds Python's interpreter lock in compiled code.

## What it sees
The process runs, but no Python thread in it answers; the others wait for it in a collective.

## Why it matters
Compiled code that does not release the lock stops every thread of the process, also those that fetch data.

## What to do
Look at the line that is named: the call there does not come back or takes very long.

## When it is wrong
A very long single call into compiled code (a sort of a huge list, a regular expression).
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions
from instep.diagnose.naming import short
from instep.diagnose.outside import find_stuck
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    found = find_stuck(run, "interpreter-lock-held")
    if found is None:
        return
    stuck = found.stuck
    here = short(stuck.here)
    yield Finding(
        id="hang/interpreter-lock-held",
        title=f"{found.names} {found.verb} at {here} with the interpreter lock {found.consequence}",
        cause=f"No thread of the process answers: compiled code called at {here} does not release the interpreter lock.",
        fix=(f"look at the call at {here}",),
        evidence=cite_positions(run, found.positions),
        certainty=found.certainty,
        ranks=found.ranks,
        where=stuck.cause_at or stuck.here,
    )

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

from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.outside import explain_outside
from instep.diagnose.run_view import RunView, short
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "rank-stuck-outside":
        return
    stuck = explain_outside(run, hang.outside[0])
    if stuck.kind != "interpreter-lock-held":
        return
    rank = stuck.position.rank
    yield Finding(
        id="hang/interpreter-lock-held",
        title=f"rank {rank} holds the interpreter lock at {short(stuck.here)}",
        cause=f"No thread of rank {rank} answers: compiled code called at {short(stuck.here)} does not release the interpreter lock.",
        fix=(f"look at the call at {short(stuck.here)}",),
        evidence=cite_positions(run, hang.outside + hang.waiting),
        certainty="possible",
        ranks=(rank,),
        where=stuck.cause_at or stuck.here,
    )

"""A rank's process is stopped.

## What it sees
The process is in state T: SIGSTOP, SIGTSTP or a debugger holds it. The others wait for it.

## Why it matters
It will not go on by itself.

## What to do
Let it go on with `kill -CONT PID`, or detach the debugger.

## When it is wrong
A person who debugs the rank on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.outside import explain_outside
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "rank-stuck-outside":
        return
    stuck = explain_outside(run, hang.outside[0])
    if stuck.kind != "stopped-process":
        return
    rank = stuck.position.rank
    yield Finding(
        id="hang/stopped-process",
        title=f"the process of rank {rank} is stopped",
        cause=f"Something has stopped the process (SIGSTOP, a debugger); the others wait for rank {rank}.",
        fix=("let it go on: kill -CONT with its process id, or detach the debugger",),
        evidence=cite_positions(run, hang.outside + hang.waiting),
        certainty="certain",
        ranks=(rank,),
        where=stuck.cause_at or stuck.here,
    )

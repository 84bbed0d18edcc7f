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

from instep.diagnose.hang import cite_positions
from instep.diagnose.outside import find_stuck
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    found = find_stuck(run, "stopped-process")
    if found is None:
        return
    stuck = found.stuck
    yield Finding(
        id="hang/stopped-process",
        title=f"the process of {found.names} is stopped {found.consequence}",
        cause="Something has stopped the process: SIGSTOP, Ctrl-Z or a debugger. It will not go on by itself.",
        fix=("let it go on: kill -CONT with its process id, or detach the debugger",),
        evidence=cite_positions(run, found.positions),
        certainty="certain",
        ranks=found.ranks,
        where=stuck.cause_at or stuck.here,
    )

"""A data loader's worker waits for a lock that it inherited locked.

## What it sees
A rank waits for a batch. Its worker waits for a lock, and another thread of the rank is in a block that holds that lock.

## Why it matters
A forked worker has a copy of every lock as it was at that moment. The thread that held it does not exist in the worker, so the
copy is never released.

## What to do
Start workers with `multiprocessing_context="spawn"` or `"forkserver"`, start the thread after the workers, or let data set and
thread have no lock in common.

## When it is wrong
A lock of the same name may be another lock; the worker would then wait for something else.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions
from instep.diagnose.outside import find_stuck
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    found = find_stuck(run, "lock-across-fork")
    if found is None:
        return
    stuck = found.stuck
    yield Finding(
        id="hang/lock-across-fork",
        title=f"{found.names} {found.verb} waiting for a batch whose worker waits for a lock that was locked when it was forked",
        cause=f"{stuck.detail}. The worker has a copy of the lock that nobody will release.",
        fix=(
            'start workers with multiprocessing_context="spawn" or "forkserver"',
            "or share no lock between threads and the data set",
        ),
        evidence=cite_positions(run, found.positions),
        certainty="certain" if stuck.proven else "likely",
        ranks=found.ranks,
        where=stuck.cause_at or stuck.here,
    )

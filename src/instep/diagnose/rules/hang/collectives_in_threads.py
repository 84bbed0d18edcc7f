"""Two threads of a rank use the same process group.

## What it sees
Collectives of the default group that were started by a thread beside the main one, and a stall or an abort.

## Why it matters
Collectives pair by their order. With two threads the order differs from rank to rank and from run to run, so that an all-reduce of
the one thread meets a gradient of the other.

## What to do
Give the thread a group of its own, made on all ranks: `group = dist.new_group()`, and pass it as `group=group`. Start the thread on
every rank, or let the main thread do it.

## When it is wrong
When the threads take turns on all ranks in one fixed order, and the stall has another cause.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.diagnose.threads import Threaded, find_threaded
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is not None and hang.kind == "collectives-in-threads" and hang.threads is not None:
        yield _describe(run, hang.threads)
    aborted = [view for view in run.ranks if view.failure is not None and (view.error is None or view.echoes)]
    threads = find_threaded(run) if run.stall is None and any(view.error is None for view in aborted) else None
    if threads is not None and not any(view.error is not None and not view.echoes for view in run.ranks):
        yield _describe(run, threads)


def _describe(run: RunView, threads: Threaded) -> Finding:
    where, some = short(threads.site), len(threads.ranks) < run.world_size
    only = f"{name_ranks(threads.ranks)} only" if some else "every rank"
    return Finding(
        id="hang/collectives-in-threads",
        title=f"a second thread calls {threads.operation} at {where} on {only}, in the group that the main thread uses",
        cause="Collectives pair by their order, and with two threads the order is not the same on all ranks.",
        fix=(
            f"make a group for the thread on all ranks, dist.new_group(), and pass it at {where}",
            "start the thread on every rank" if some else "or let the main thread do it",
        ),
        evidence=(
            run.by_rank[threads.ranks[0]].cite(f"{threads.operation} at {where}, not in the main thread", "page.bin"),
            *cite_positions(run, tuple(one for one in run.positions if one.kind != "ended")[:4]),
        ),
        certainty="likely",
        ranks=threads.ranks if some else (),
        where=threads.site,
        explains=("hang/*", "crash/*", "numbers/silent-pairing"),
    )

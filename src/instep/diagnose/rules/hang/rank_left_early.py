"""A rank has ended with exit code 0 while the others wait for it.

## What it sees
Ranks that wait in a collective, and one whose process has ended well: at the end of its program, or by `sys.exit(0)` or
`os._exit(0)` in the middle of it.

## Why it matters
A collective returns when every rank of its group has entered it. A rank that has gone never will.

## What to do
Let every rank do the same number of steps, and leave only after the last collective of all.

## When it is wrong
Hardly: the rank has gone, and the others still wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.ends import deciding_exit, describe_end, exit_site, find_way_out
from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.diagnose.stop_requests import find_stop_request
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "rank-left-early" or run.stall is None:
        return
    ended = tuple(run.stall["ended"])
    first, waiting = run.by_rank[ended[0]], hang.waiting[0]
    stop = find_stop_request(run)
    way_out, _ = find_way_out(first, waiting.frames)
    where = stop.where if stop is not None else deciding_exit(first) or way_out or exit_site(first) or waiting.site
    yield Finding(
        id="hang/rank-left-early",
        title=f"{name_ranks(ended)} ended after {first.num_steps} steps, {name_ranks(one.rank for one in hang.waiting)} "
        f"wait{'s' if len(hang.waiting) == 1 else ''} in {waiting.operation} at {short(waiting.site)}",
        cause=f"{describe_end(first)} while the others still needed it."
        + (f" {stop.cause}" if stop is not None else ""),
        fix=(
            stop.fix if stop is not None else "let every rank do the same number of steps",
            f"change {short(where)}" if where else "look at what decides about the end of the program",
        ),
        evidence=(
            first.cite(f"rank {first.rank} ended after {first.num_steps} steps, without an error"),
            *(stop.cite(run) if stop is not None else ()),
            *cite_positions(run, hang.waiting),
        ),
        certainty="certain" if hang.proven else "likely",
        ranks=ended,
        where=where,
        explains=("hang/*", "crash/*"),
    )

"""Ranks took different branches, with different collectives behind them.

## What it sees
Ranks that wait in collectives at different lines, and a condition that holds one of the lines and not the other.

## Why it matters
The condition depends on a value that differs between ranks (data, random numbers), so the collectives do not meet.

## What to do
Enter the same collectives on every rank: decide with a value that all ranks share, or move the collective out of the branch.

## When it is wrong
Hardly: the deadlock is there when this is said. The condition named may be one of several.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions, classify, ranks_with
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "different-branches" or hang.fork is None:
        return
    fork = hang.fork
    yield Finding(
        id="hang/different-branches",
        title=f"rank {fork.inside} took the branch at {short(fork.where)}, rank {fork.outside} did not",
        cause=f"`{fork.where.source}` came out differently on the ranks, and different collectives lie behind it.",
        fix=(f"make {short(fork.where)} come out the same on every rank, or move the collective out of the branch",),
        evidence=cite_positions(run, hang.waiting + hang.outside),
        certainty="certain" if hang.proven else "likely",
        ranks=ranks_with(hang, fork.inside),
        where=fork.where,
        explains=("hang/*",),
    )

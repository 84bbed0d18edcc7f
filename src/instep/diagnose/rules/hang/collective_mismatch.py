"""Ranks wait in different collectives.

## What it sees
The collective that each rank has entered and not left. They differ, or they have different numbers in their group.

## Why it matters
A collective returns when every rank of its group has entered the same one. These wait for each other until the timeout.

## What to do
Take the branch that leads to the odd collective on every rank, or on none.

## When it is wrong
Ranks of different process groups may rightly be in different collectives; it is said only when all of them are stuck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from instep.diagnose.hang import Hang, cite_positions, classify
from instep.diagnose.missing import explain_missing
from instep.diagnose.naming import short
from instep.diagnose.rank_view import Position
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "collective-mismatch":
        return
    odd, usual = _odd_and_usual(hang)
    where, why = explain_missing(run, hang.mispairing) if hang.mispairing is not None else (None, "")
    operations = f"{odd.operation} at {short(odd.site)}", f"{usual.operation} at {short(usual.site)}"
    yield Finding(
        id="hang/collective-mismatch",
        title=f"rank {odd.rank} is in {operations[0]}, rank {usual.rank} in {operations[1]}",
        cause=why or "The ranks have entered different collectives, so they wait for each other.",
        fix=(f"run {short(where) if where else operations[0]} on every rank, or on none",),
        evidence=cite_positions(run, hang.waiting + hang.outside),
        certainty="certain" if hang.proven else "likely",
        ranks=(odd.rank,),
        where=where or odd.site,
    )


def _odd_and_usual(hang: Hang) -> tuple[Position, Position]:
    """The rank that departed from its habit; else the one in the rarest collective, or the one that is behind."""
    positions = list(hang.waiting)
    if hang.mispairing is not None and hang.mispairing.odd is not None:
        odd = next((one for one in positions if one.rank == hang.mispairing.odd), positions[0])
    else:
        counts = Counter(one.operation for one in positions)
        odd = min(positions, key=lambda one: (counts[one.operation], one.step, -one.rank))
    return odd, next(one for one in positions if one.rank != odd.rank)

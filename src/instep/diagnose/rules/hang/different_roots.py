"""Ranks named different roots in the same collective.

## What it sees
The rank that each process passed to the same call as `src` or `dst`.

## Why it matters
A broadcast sends from one rank to all others. Where each rank names itself, all send and nobody receives: they wait for ever, or
go on with values of their own.

## What to do
Name the same rank on every process, as a number: `src=0`.

## When it is wrong
Hardly: one call of one group has one root.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.pairing import find_mispairing
from instep.diagnose.rules.crash.uneven_collectives import cite
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    mispairing = find_mispairing(run)
    if mispairing is None or mispairing.differs != "root":
        return
    slots = mispairing.slots
    where, operation = slots[0].site, slots[0].operation
    word = "dst" if operation.startswith(("reduce", "gather")) else "src"
    roots = ", ".join(f"{slot.root} on rank {slot.rank}" for slot in slots[:8])
    own = all(slot.root == slot.rank for slot in slots)
    yield Finding(
        id="hang/different-roots",
        title=f"{operation} at {short(where)} was given different ranks as {word}: {roots}",
        cause=("Each rank names itself" if own else "The ranks name different ones")
        + ", so that they do not send and receive what belongs together.",
        fix=(f"name one rank for all at {short(where)}, as {word}=0",),
        evidence=cite(run, mispairing),
        certainty="certain",
        where=where,
        explains=("hang/*", "crash/*", "numbers/*"),
    )

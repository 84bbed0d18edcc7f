"""Ranks entered the same collective with tensors of different sizes or types.

## What it sees
The number and the type of the elements that each rank passed to the same call.

## Why it matters
A backend that sends pieces of different sizes waits for bytes that never come, or goes on with wrong numbers.

## What to do
Pass tensors of one size and one dtype: pad to the largest (all-reduce the sizes first), or gather objects instead.

## When it is wrong
Hardly: these collectives need equal sizes and types.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import classify
from instep.diagnose.naming import short
from instep.diagnose.pairing import Mispairing
from instep.diagnose.rules.crash.uneven_collectives import cite
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding

_CAUSES = {
    "elements": "The sizes have to be equal on all ranks. What the tensor is made of differs between them, as the last, smaller batch does.",
    "dtype": "The type has to be equal on all ranks: bytes are sent, and each rank reads them as its own type. Different branches made the tensor.",
}
_FIXES = {
    "elements": "pass tensors of one size at {}: pad to the largest, or use all_gather_object",
    "dtype": "give the tensor the same dtype on every rank before {}",
}


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is not None and hang.kind == "different-sizes" and hang.mispairing is not None:
        yield describe_sizes("hang/different-sizes", run, hang.mispairing)


def describe_sizes(name: str, run: RunView, mispairing: Mispairing) -> Finding:
    slots = mispairing.slots
    where = slots[0].site
    what = "numbers of elements" if mispairing.differs == "elements" else "types of numbers"
    values = ", ".join(f"{getattr(slot, mispairing.differs)} on rank {slot.rank}" for slot in slots[:8])
    return Finding(
        id=name,
        title=f"{slots[0].operation} at {short(where)} was given different {what}: {values}",
        cause=_CAUSES[mispairing.differs],
        fix=(_FIXES[mispairing.differs].format(short(where)),),
        evidence=cite(run, mispairing),
        certainty="certain",
        where=where,
        explains=("hang/*", "crash/*", "numbers/silent-pairing"),
    )

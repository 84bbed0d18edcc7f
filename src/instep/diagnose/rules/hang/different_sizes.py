"""Ranks entered the same collective with tensors of different sizes.

## What it sees
The number of elements that each rank passed to the same call.

## Why it matters
A backend that sends pieces of different sizes waits for bytes that never come, or goes on with wrong numbers.

## What to do
Pass tensors of one size: pad to the largest (all-reduce the sizes first), or gather objects instead.

## When it is wrong
Hardly: these collectives need equal sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import classify
from instep.diagnose.naming import short
from instep.diagnose.pairing import Mispairing
from instep.diagnose.rules.crash.uneven_collectives import cite
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is not None and hang.kind == "different-sizes" and hang.mispairing is not None:
        yield describe_sizes("hang/different-sizes", run, hang.mispairing)


def describe_sizes(name: str, run: RunView, mispairing: Mispairing) -> Finding:
    slots = mispairing.slots
    sizes = ", ".join(f"{slot.elements} on rank {slot.rank}" for slot in slots[:8])
    where = slots[0].site
    return Finding(
        id=name,
        title=f"{slots[0].operation} at {short(where)} was given different numbers of elements: {sizes}",
        cause="The sizes have to be equal on all ranks. What the tensor is made of differs between them, as the last, smaller batch does.",
        fix=(f"pass tensors of one size at {short(where)}: pad to the largest, or use all_gather_object",),
        evidence=cite(run, mispairing),
        certainty="certain",
        where=where,
        explains=("hang/*", "crash/*", "numbers/silent-pairing"),
    )

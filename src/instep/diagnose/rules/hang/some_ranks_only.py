"""A collective stands where only some ranks come by.

## What it sees
Ranks that wait in collectives at different lines, and a condition on the rank that sends them there.

## Why it matters
A collective returns when every rank of its group has entered it. Behind `if rank == 0:` nobody else does. Calling a
model wrapped in DistributedDataParallel is one too: its forward sends buffers to all ranks.

## What to do
Call it on every rank, or on none. For an evaluation on one rank call `model.module(x)`, not `model(x)`.

## When it is wrong
Hardly: the deadlock is there when this is said. The condition named may be one of several.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import Hang, cite_positions, classify, ranks_with
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "some-ranks-only" or hang.fork is None:
        return
    fork = hang.fork
    inside = next(one for one in hang.waiting if one.rank == fork.inside)
    operation = inside.operation
    there = ranks_with(hang, fork.inside)
    elsewhere = [one.rank for one in hang.waiting + hang.outside if one.rank not in there]
    # The few are the odd ones: those that came by, or those that did not.
    title = f"{name_ranks(there)} wait{'s' * (len(there) == 1)} in {operation} at {short(inside.site)}, where "
    title += "only some ranks come by" if len(there) <= len(elsewhere) else f"{name_ranks(elsewhere)} did not come by"
    yield Finding(
        id="hang/some-ranks-only",
        title=title,
        cause=f"The condition at {short(fork.condition)} depends on the rank: it leads rank {fork.inside} to {operation}, which "
        f"rank {fork.outside} does not enter, and the ranks wait for each other.",
        fix=_what_to_do(hang, operation, short(fork.where)),
        evidence=cite_positions(run, hang.waiting + hang.outside),
        certainty="certain" if hang.proven else "likely",
        ranks=there if len(there) <= len(elsewhere) else tuple(elsewhere),
        where=fork.where,
        explains=("hang/*",),
    )


def _what_to_do(hang: Hang, operation: str, where: str) -> tuple[str, ...]:
    position = next(one for one in hang.waiting if hang.fork and one.rank == hang.fork.inside)
    is_guard = hang.fork is not None and hang.fork.where == hang.fork.condition
    first = f"let every rank go past {where}, or none" if is_guard else f"run {where} on every rank, or on none"
    if operation.startswith("broadcast") and position.frames:
        return ("on one rank call the inner model: model.module(x), whose forward sends nothing", first)
    return (first,)

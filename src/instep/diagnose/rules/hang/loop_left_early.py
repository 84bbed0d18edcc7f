"""One rank has left a loop in which another still works.

## What it sees
One rank waits in a collective inside a loop; another waits at a line behind that loop, and its data were not used up.

## Why it matters
What decides about the end of the loop is a value that each rank has for itself: its clock, its loss, its files. The ranks
disagree by one iteration, and wait for each other from then on.

## What to do
Let one rank decide and send the decision to all, as `dist.broadcast` of a flag, or all-reduce the value before it is compared.

## When it is wrong
When the loop has several ways out, the one named here is the most likely one.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import Hang, cite_positions, classify, ranks_with
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.diagnose.stop_requests import StopRequest
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "loop-left-early" or hang.fork is None:
        return
    fork = hang.fork
    if hang.stop is not None:
        yield _stopped_by_callback(run, hang, hang.stop)
        return
    one_of = "" if fork.choices < 2 else f" (one of {fork.choices} ways out)"
    by_length = fork.condition is None and fork.loop is not None and fork.loop != fork.where
    decided = f"How often the loop at {short(fork.loop)} runs" if by_length else "The way out of the loop"
    yield Finding(
        id="hang/loop-left-early",
        title=f"rank {fork.outside} has left the loop in which rank {fork.inside} still waits",
        cause=f"{decided} is decided at {short(fork.where)}{one_of} by each rank for itself: `{fork.where.source}`. Rank {fork.outside} went on, rank {fork.inside} waits for it in the loop.",
        fix=(f"let one rank decide at {short(fork.where)} and broadcast the decision, or all-reduce the value first",),
        evidence=cite_positions(run, hang.waiting + hang.outside),
        certainty="certain" if hang.proven else "likely",
        ranks=ranks_with(hang, fork.outside),
        where=fork.where,
        explains=("hang/*", "numbers/*"),
    )


def _stopped_by_callback(run: RunView, hang: Hang, stop: StopRequest) -> Finding:
    """The loop is a training library's: what decides about its end stands in a callback of the user's."""
    return Finding(
        id="hang/loop-left-early",
        title=f"a callback stopped training on {name_ranks(stop.ranks)}, {name_ranks(stop.others)} still train{'s' * (len(stop.others) == 1)}",
        cause=f"{stop.cause} The others wait for {name_ranks(stop.ranks)} in the loop.",
        fix=(f"at {short(stop.where)} {stop.fix}",),
        evidence=(*stop.cite(run), *cite_positions(run, hang.waiting + hang.outside)),
        certainty="certain" if hang.proven else "likely",
        ranks=stop.ranks,
        where=stop.where,
        explains=("hang/*", "numbers/*"),
    )

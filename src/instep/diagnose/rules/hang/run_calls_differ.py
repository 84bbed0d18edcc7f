"""Ranks came to different calls of one `instep.Run`.

## What it sees
The error RanksDisagree, which the ranks raise as soon as they notice, the lines at which each of them was, and the condition that
led them apart.

## Why it matters
Calls as `run.mean`, `run.save` and `step.update` need every rank. A rank that leaves one out would wait for the others for ever,
and they for it.

## What to do
Make the call on every rank, and use its result on one: `mean = run.mean(x)`, then `if run.is_main: print(mean)`.

## When it is wrong
Hardly: the ranks told each other where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.diagnose.branches import Fork, compare
from instep.diagnose.frames import frame_of
from instep.diagnose.missing import explain_on_rank
from instep.diagnose.naming import short
from instep.diagnose.rank_view import Position, RankView
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding

_TYPE = "RanksDisagree"


def check(run: RunView) -> Iterator[Finding]:
    told = {view.rank: error for view in run.ranks if (error := _error(view)) is not None and error["type"] == _TYPE}
    if not told:
        return
    # The rank that raised later may only say that the first has gone.
    error = next((one for one in told.values() if f"by {_TYPE}" not in one["message"]), next(iter(told.values())))
    fork = _find_fork(run, told)
    sites = {rank: site for rank, one in told.items() if (site := _site(one)) is not None}
    where = fork.where if fork is not None else next(iter(sites.values()), None)
    yield Finding(
        id="hang/run-calls-differ",
        title=(error["message"].splitlines() or [""])[0][:300],
        cause=f"`{(fork.condition or fork.where).source}` at {short(fork.condition or fork.where)} came out differently on the ranks."
        if fork is not None
        else "The ranks made different calls, or with different arguments, of which each needs all of them.",
        fix=(f"make the call on every rank alike; look at {short(where)}",),
        evidence=tuple(run.by_rank[rank].cite(f"rank {rank} was at {short(site)}") for rank, site in sites.items()),
        certainty="certain",
        ranks=_odd(fork),
        where=where,
        explains=("hang/*", "crash/*"),
    )


def _error(view: RankView) -> dict[str, Any] | None:
    return view.error or view.uncaught


def _site(error: dict[str, Any]) -> CallSite | None:
    return frame_of(error["frames"][0]).site if error["frames"] else None


def _find_fork(run: RunView, told: dict[int, dict[str, Any]]) -> Fork | None:
    """Where the ways of two ranks part, by the stacks of what they raised."""
    positions = [_position(run, rank, error) for rank, error in sorted(told.items())]
    pairs = ((one, two) for index, one in enumerate(positions) for two in positions[index + 1 :])
    fork = next((fork for one, two in pairs if (fork := compare(one, two)) is not None), None)
    return fork or next((fork for one in positions if (fork := _on_rank(one)) is not None), None)


def _on_rank(position: Position) -> Fork | None:
    """Where the others had no time to tell: a condition on the rank that led one to its call."""
    found = next((one for frame in position.frames if (one := explain_on_rank(frame)) is not None), None)
    return Fork("rank-branch", position.rank, -1, *found) if found is not None else None


def _position(run: RunView, rank: int, error: dict[str, Any]) -> Position:
    frames = tuple(frame_of(row) for row in error["frames"])
    return Position(rank, "collective", "", _site(error), frames, 0.0, run.by_rank[rank].num_steps, 0)


def _odd(fork: Fork | None) -> tuple[int, ...]:
    if fork is None:
        return ()
    return (fork.outside,) if fork.kind == "loop-left" else (fork.inside,)

"""One rank is steadily slower, and the others wait for it.

## What it sees
The time that each rank works between two averages, without what it waits for the others.

## Why it matters
Every step takes as long as its slowest rank needs.

## What to do
Look at what that rank does more: evaluation or logging on one rank, more or longer samples, a slower device, another program on the same cores.

## When it is wrong
Runs on a machine that others use too.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.time_shares import measure_shares
from instep.records.finding import CallSite, Finding

MIN_RATIO = 2.0
MIN_SHARE = 0.3  # of a step, that the others lose
MIN_EXCESS = 0.2  # of the samples of a rank
MIN_SECONDS = 0.008  # per step: less is the noise of a busy machine


def check(run: RunView) -> Iterator[Finding]:
    found = {view.rank: shares for view in run.ranks if (shares := measure_shares(view)) is not None}
    if len(found) < len(run.ranks) or len(found) < 2 or not all(wraps(view) for view in run.ranks):
        return  # only of wrapped models it is known what of a step is waiting for the others
    own = {rank: shares.usual_own_seconds for rank, shares in found.items()}
    slow = max(own, key=lambda rank: own[rank])
    others = sorted(seconds for rank, seconds in own.items() if rank != slow)
    middle = others[len(others) // 2]
    step = found[slow].total_seconds / found[slow].steps
    if own[slow] < MIN_RATIO * middle or own[slow] - middle < max(MIN_SECONDS, MIN_SHARE * step):
        return
    kind = found[slow].largest_excess(next(shares for rank, shares in found.items() if rank != slow))
    view = run.by_rank[slow]
    where = _line(view, [one for one in run.ranks if one.rank != slow])
    where = where or _line_of(view, kind)
    yield Finding(
        id="speed/straggler",
        title=f"rank {slow} needs {own[slow] * 1e3:.0f} ms of its own per step, the others {middle * 1e3:.0f} ms",
        cause=f"The others wait {(own[slow] - middle) * 1e3:.0f} ms of every step for rank {slow}; most of the difference is in {kind}{f' at {short(where)}' if where else ''}.",
        fix=(
            f"look at what rank {slow} does more in {kind} (up to {step / (step - own[slow] + middle):.1f} times as fast without it)",
        ),
        evidence=tuple(
            run.by_rank[rank].cite(f"rank {rank}: {seconds * 1e3:.1f} ms per step without waiting", "page.bin")
            for rank, seconds in list(own.items())[:4]
        ),
        certainty="likely",
        ranks=(slow,),
        where=where,
    )


_LEAVES = {"data": "leave-data", "backward": "leave-backward", "the optimizer": "leave-step"}


def _line_of(view: RankView, kind: str) -> CallSite | None:
    """Of a part of a step: the line from which it was entered last."""
    wanted = _LEAVES.get(kind, "leave-forward")
    mark = next((mark for mark in reversed(view.marks) if mark.kind == wanted), None)
    return view.site(mark.site) if mark is not None else None


def _line(view: RankView, others: list[RankView]) -> CallSite | None:
    """The user's line in which this rank was seen more often than the others, outside of collectives."""
    mine, theirs = _shares(view), [_shares(one) for one in others]
    excess = {
        line: share - max((table.get(line, 0.0) for table in theirs), default=0.0) for line, share in mine.items()
    }
    line = max(excess, key=lambda one: excess[one], default=None)
    if line is None or excess[line] < MIN_EXCESS:
        return None
    return CallSite(line[0], line[1], source_line(*line))


def _shares(view: RankView) -> dict[tuple[str, int], float]:
    event = view.last("lines")
    return {(file, line): count / event["total"] for file, line, count in event["top"]} if event else {}

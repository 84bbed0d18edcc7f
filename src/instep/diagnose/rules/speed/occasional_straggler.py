"""One rank is slow now and then, and the others wait for it.

## What it sees
Steps in which one rank worked much longer than in its other steps (what it waited for others is not counted, and is timed before the
average, so that a slow backward is not hidden in it), and in which no other rank did: how often, how long, and at which line.

## Why it matters
A step ends when its slowest rank has come. A pause of one rank is a pause of all; with many ranks that pause by turns hardly a step is
without one.

## What to do
Look at what that rank does there: a log or a checkpoint written by one rank, an evaluation on one rank, samples that are much longer, a
data worker that stalls, Python's garbage collector, another program on the same cores. Do it on all ranks, less often, or in a thread.

## When it is wrong
Runs on a machine that others use too: a disk or a network that is busy now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.time_shares import Shares, measure_shares
from instep.records.event import Event
from instep.records.finding import CallSite, Finding

MIN_TIMES = 5
MAX_SHARE_OF_STEPS = 0.5  # more often than that it is no exception
MIN_LOST = 0.2  # of the time
MIN_SECONDS = 2.0  # lost in all

_WORDS = {"data": "its data loader", "forward": "forward", "backward_cpu": "backward", "step": "the optimizer"}


def check(run: RunView) -> Iterator[Finding]:
    found = {view.rank: shares for view in run.ranks if (shares := measure_shares(view)) is not None}
    if not run.is_whole or len(found) < len(run.ranks) or len(found) < 2 or not all(wraps(view) for view in run.ranks):
        return
    lost = {rank: sum(map(excess, slow_alone(run, rank))) for rank in found}
    rank = max(lost, key=lambda one: lost[one])
    events, shares, view = slow_alone(run, rank), found[rank], run.by_rank[rank]
    if not MIN_TIMES <= len(events) <= MAX_SHARE_OF_STEPS * shares.steps:
        return
    if lost[rank] < max(MIN_SECONDS, MIN_LOST * shares.total_seconds):
        return
    yield _finding(view, events, shares, lost[rank])


def slow_alone(run: RunView, rank: int) -> list[Event]:
    """Slow steps of a rank in which no other rank was slow too, as all are when they evaluate."""
    others = {event.step for view in run.ranks if view.rank != rank for event in view.named("slow-step")}
    return [event for event in run.by_rank[rank].named("slow-step") if event.step not in others]


def excess(event: Event) -> float:
    return event["own"] - event["usual"]


def _finding(view: RankView, events: list[Event], shares: Shares, lost: float) -> Finding:
    longest = max(events, key=excess)
    where, what = _line(events), _part(events)
    at = f" at {short(where)}" if where is not None else ""
    steps = ", ".join(str(event.step) for event in events[:6]) + (", ..." if len(events) > 6 else "")
    gain = shares.total_seconds / max(shares.total_seconds - lost, 0.05 * shares.total_seconds)
    return Finding(
        id="speed/occasional-straggler",
        title=f"rank {view.rank} was slow in {len(events)} of {shares.steps} steps, and the others waited {lost:.1f} s for it ({lost / shares.total_seconds:.0%} of the time)",
        cause=f"In these steps rank {view.rank} worked {lost / len(events) * 1e3:.0f} ms longer than its usual {events[-1]['usual'] * 1e3:.0f} ms, up to "
        f"{excess(longest) * 1e3:.0f} ms in step {longest.step}; most of it in {what}{at}.",
        fix=(
            f"look at what rank {view.rank} does more in {what}{at} (up to {gain:.1f} times as fast without it)",
            "do it on every rank, less often, or beside the training in a thread",
        ),
        evidence=(
            view.cite(f"slow steps: {steps}"),
            *(
                view.cite(
                    f"step {event.step}: {event['own'] * 1e3:.0f} ms of its own, usually {event['usual'] * 1e3:.0f} ms"
                )
                for event in events[:3]
            ),
        ),
        certainty="likely",
        ranks=(view.rank,),
        where=where,
        explains=("speed/straggler",),
    )


def _part(events: list[Event]) -> str:
    """Where most of the excess was; what is in none of the watched calls is the rest of the loop."""
    spent = {name: sum(event["spent"][name] for event in events) for name in _WORDS}
    total = sum(map(excess, events))
    name = max(spent, key=lambda one: spent[one])
    return _WORDS[name] if spent[name] > 0.5 * total else "the rest of the loop"


def _line(events: list[Event]) -> CallSite | None:
    """The user's line in which it was seen most often during these steps."""
    seen = Counter((file, line) for event in events for file, line in event["seen"])
    if not seen:
        return None
    (file, line), count = seen.most_common(1)[0]
    return CallSite(file, line, source_line(file, line)) if count >= 3 and 2 * count > seen.total() else None

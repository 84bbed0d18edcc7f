"""A rank waits for a thread that has ended with an exception.

## What it sees
The main thread waits for a queue, a lock, an event or a thread, and another thread of the rank has ended with an exception.

## Why it matters
An exception in a thread ends that thread only. A loader of one's own that fills a queue from a thread stops filling it, and the
rank waits for ever; the others wait for the rank.

## What to do
Mend what the thread raised. Let the thread hand its exception over: put it into the queue, and raise it where the queue is read.

## When it is wrong
When the thread that failed was another one than the one that is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.hang import cite_positions
from instep.diagnose.naming import short
from instep.diagnose.outside import find_stuck
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    found = find_stuck(run, "thread-died")
    if found is None:
        return
    view = run.by_rank[found.ranks[0]]
    event = view.named("thread-raised")[-1]
    frames = event["frames"]
    raised = CallSite(frames[0]["file"], frames[0]["line"], source_line(frames[0]["file"], frames[0]["line"]))
    first = (event["message"].splitlines() or [""])[0][:160]
    waits_at = short(found.stuck.here)
    yield Finding(
        id="hang/thread-died",
        title=f"{found.names} {found.verb} waiting at {waits_at} for a thread that ended with {event['type']}: {first}",
        cause=f"The exception at {short(raised)} ended the thread {event['thread']}; what the main thread waits for does not "
        f"come, {found.consequence}.",
        fix=(
            f"mend what raised it at {short(raised)}",
            "hand exceptions of the thread over to the main thread, as through the queue",
        ),
        evidence=(
            view.cite(f"thread {event['thread']} raised {event['type']}: {first} at {short(raised)}"),
            *cite_positions(run, found.positions),
        ),
        certainty="likely" if found.stuck.proven else "possible",
        ranks=found.ranks,
        where=raised,
    )

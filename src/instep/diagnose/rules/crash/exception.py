"""A rank raised an exception that was not caught.

## What it sees
The exception, its line in the user's code, and the ranks that raised the same one.

## Why it matters
The rank has ended, and the others cannot go on without it. Their errors about closed connections follow from it.

## What to do
Read the traceback of the rank that is named.

## When it is wrong
When two ranks raise at about the same time, the first to be seen may be the consequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    raised = [view for view in run.ranks if (view.failure or {}).get("error") and not view.echoes]
    if not raised:
        return
    view = min(raised, key=lambda one: (one.failure or {}).get("ended_at") or 0)
    error = (view.failure or {})["error"]
    if error.get("is_usage"):
        return
    place = error.get("where")
    where = CallSite(place["file"], place["line"], source_line(place["file"], place["line"])) if place else None
    first = (error["message"].strip().splitlines() or [""])[0][:200]
    same = [one.rank for one in raised if (one.failure or {})["error"]["type"] == error["type"]]
    yield Finding(
        id="crash/exception",
        title=f"rank {view.rank} raised {error['type']}: {first}",
        cause="The exception was not caught, so the rank ended, and the others cannot go on without it.",
        fix=(f"look at {short(where)}",),
        evidence=(view.cite(f"{error['type']}: {first} at {short(where)}, step {view.num_steps}", "failure.json"),),
        certainty="certain",
        ranks=tuple(same),
        where=where,
    )

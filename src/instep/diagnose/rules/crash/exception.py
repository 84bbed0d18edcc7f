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

import re
from collections.abc import Iterator
from typing import Any

from instep.diagnose.frames import frames_of_text, source_line
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding

_WORKER = re.compile(r"Caught (\w+) in (DataLoader worker process \d+|pin memory thread.*)\.")


def check(run: RunView) -> Iterator[Finding]:
    raised = [(view, error) for view in run.ranks if (error := _own_error(view)) is not None]
    if not raised:
        return
    view, error = min(raised, key=lambda one: (one[0].failure or {}).get("ended_at") or 0)
    if error.get("is_usage"):
        return
    where = _in_a_worker(error) or _site(error.get("where"))
    kind, first = _what(error)
    same = [one.rank for one, other in raised if other["type"] == error["type"]]
    yield Finding(
        id="crash/exception",
        title=f"rank {view.rank} raised {kind}: {first}",
        cause="The exception was not caught, so the rank ended, and the others cannot go on without it.",
        fix=(f"look at {short(where)}",),
        evidence=(view.cite(f"{kind}: {first} at {short(where)}, step {view.num_steps}", "failure.json"),),
        certainty="certain",
        ranks=tuple(same),
        where=where,
    )


def _own_error(view: RankView) -> dict[str, Any] | None:
    """What it raised, unless that only says that another rank has gone; of a process that lives still, too."""
    told = (view.failure or {}).get("error")
    if told:
        return None if view.echoes else told
    error = view.uncaught
    return error | {"where": next(iter(error["frames"]), None)} if error is not None and view.failure is None else None


def _site(place: dict[str, Any] | None) -> CallSite | None:
    return CallSite(place["file"], place["line"], source_line(place["file"], place["line"])) if place else None


def _in_a_worker(error: dict[str, Any]) -> CallSite | None:
    """The user's innermost line in a process of a data loader, which hands over its traceback as text."""
    if not _WORKER.match(error["message"]):
        return None
    frames = frames_of_text(error["message"])
    return _site(frames[0]) if frames else None


def _what(error: dict[str, Any]) -> tuple[str, str]:
    """Type and first line; of an error in a worker of a data loader those that it had there."""
    lines = error["message"].strip().splitlines() or [""]
    found = _WORKER.match(error["message"])
    if found is not None:
        last = next((line for line in reversed(lines) if line.startswith(found.group(1))), lines[-1])
        return error["type"], f"{last.partition(': ')[2][:180] or lines[-1][:180]}, in {found.group(2)}"
    return error["type"], lines[0][:200]

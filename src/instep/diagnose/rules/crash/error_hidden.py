"""A rank ended with an error that its script did not show.

## What it sees
An exception that was caught on one rank, after which the script ended the rank (`sys.exit`, `os._exit`) or let it come to its end.

## Why it matters
The other ranks only see that the connection is gone. Their errors fill the log, and the cause is nowhere in it.

## What to do
Let exceptions go up, or log them on every rank.

## When it is wrong
When the rank ended for another reason after an exception that was rightly handled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.diagnose.frames import source_line
from instep.diagnose.naming import short
from instep.diagnose.rank_view import ECHO, RankView
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    hidden = [(view, error) for view in run.ranks if (error := hidden_error(view)) is not None]
    if not hidden or not any(view.failure is not None for view in run.ranks):
        return
    view, error = hidden[0]
    frames = error["frames"]
    where = CallSite(frames[0]["file"], frames[0]["line"], source_line(frames[0]["file"], frames[0]["line"]))
    first = (error["message"].strip().splitlines() or [""])[0][:200]
    ranks = tuple(one.rank for one, other in hidden if other["type"] == error["type"])
    yield Finding(
        id="crash/error-hidden",
        title=f"rank {view.rank} raised {error['type']}: {first}, which its script caught before it ended the rank",
        cause=f"The exception at {short(where)} ended rank {view.rank}; errors about closed connections on other ranks follow from it.",
        fix=(f"mend what raised it at {short(where)}", "let exceptions end the run, or log them on every rank"),
        evidence=(view.cite(f"{error['type']}: {first} at {short(where)}, step {view.num_steps}"),),
        certainty="certain",
        ranks=ranks,
        where=where,
        explains=("crash/*", "hang/*", "numbers/*"),
    )


def hidden_error(view: RankView) -> dict[str, Any] | None:
    """An error that was being handled when the script ended the rank, or that nothing came after."""
    if (view.failure or {}).get("error"):
        return None
    end = view.last("end")
    for error in end["errors"] if end is not None else ():
        if error["frames"] and not ECHO.search(error["message"]):  # without a line of the script it never ran
            return error
    raised = view.last("raised")
    if raised is None or not raised["frames"] or ECHO.search(raised["message"]) or end is not None:
        return None
    later = [mark for mark in view.marks if mark.when > raised.time + 1e-3 and mark.kind != "ended"]
    return raised.facts if not later else None

"""A rank ended itself with an exit code that says failure, and without an exception.

## What it sees
A call of `sys.exit`, `os._exit` or `exit`, or a `raise SystemExit`, with a code other than 0.

## Why it matters
The script gave up on this rank; the others cannot go on without it. Their errors about closed connections follow from it.

## What to do
Look at the condition around the line that is named. Raise an exception with the reason instead of an exit, so that it is shown.

## When it is wrong
Scripts that end all ranks so on purpose, to be started again.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import name_ranks, short
from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.crash.error_hidden import hidden_error
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, event) for view in run.ranks if (event := _gave_up(view)) is not None]
    if not found:
        return
    view, event = min(found, key=lambda one: one[1].time)
    where = CallSite(event["file"], event["line"], event["source"])
    same = tuple(one.rank for one, other in found if (other["file"], other["line"]) == (where.file, where.line))
    said = f": {event['message'].splitlines()[0][:160]}" if event.get("message") else ""
    yield Finding(
        id="crash/exit-code",
        title=f"{name_ranks(same)} ended with exit code {event['code']} at {short(where)}{said}",
        cause=f"The script itself ended the rank there, after {view.num_steps} steps, and the others cannot go on without it.",
        fix=(f"look at what leads to {short(where)}",),
        evidence=(view.cite(f"exit code {event['code']} at {short(where)}, step {view.num_steps}"),),
        certainty="certain",
        ranks=same,
        where=where,
    )


def _gave_up(view: RankView) -> Event | None:
    if view.failure is None or view.failure.get("error") or hidden_error(view) is not None:
        return None
    event = view.last("exit-called")
    return event if event is not None and event.get("code") and view.failure.get("exit_code", 0) > 0 else None

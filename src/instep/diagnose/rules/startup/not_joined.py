"""Some ranks wait in init_process_group for others that do not call it.

## What it sees
Ranks that have been in `init_process_group` for as long as `--stall-after` says, and ranks that have not come to it, or have ended
without.

## Why it matters
The group is made when every process has joined. The ranks that wait try until the timeout, half an hour later.

## What to do
Call `init_process_group` on every rank, before anything that differs between ranks: not under a condition on the rank, and not after
long work that one rank does alone.

## When it is wrong
When the rank would have come later, after long work of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.frames import Frame
from instep.diagnose.hang import cite_positions
from instep.diagnose.missing import find_rank_condition_of_callers
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.finding import CallSite, Certainty, Finding


def check(run: RunView) -> Iterator[Finding]:
    joining = [view for view in run.ranks if view.named("joining")]
    missing = [view for view in run.ranks if not view.named("joining")]
    if run.stall is None or not joining or not missing or any(view.named("joined") for view in joining):
        return
    first, away = joining[0], missing[0]
    site = first.site(first.named("joining")[-1]["site"])
    condition = find_rank_condition_of_callers(first, site) if site is not None else None
    position = away.position
    here = f"; it is {position.describe()}" if position is not None else ""
    yield Finding(
        id="startup/not-joined",
        title=f"{name_ranks(one.rank for one in joining)} wait{'s' * (len(joining) == 1)} in init_process_group at {short(site)}, "
        f"{name_ranks(one.rank for one in missing)} did not call it{here}",
        cause=f"The condition at {short(condition[1])} depends on the rank and leads only some ranks there."
        if condition is not None
        else "The group is made when every rank has joined, and this one has not come yet.",
        fix=("call init_process_group on every rank, before anything that differs between ranks",),
        evidence=cite_positions(run, tuple(run.positions)),
        certainty=_certainty(away, condition[1] if condition is not None else None),
        ranks=tuple(one.rank for one in missing),
        where=condition[0] if condition is not None else (position.site if position is not None else site),
        explains=("hang/*",),
    )


def _certainty(away: RankView, condition: CallSite | None) -> Certainty:
    """A rank that has passed by the condition does not come any more; one that has not may only be slow."""
    if away.exit_code == 0 and not away.is_alive:
        return "certain"
    return (
        "likely"
        if condition is not None and any(_is_behind(frame, condition) for frame in away.main_frames)
        else "possible"
    )


def _is_behind(frame: Frame, condition: CallSite) -> bool:
    source = load(frame.file) if frame.file == condition.file else None
    if source is None or source.function_at(frame.line) is not source.function_at(condition.line):
        return False
    statement = source.statement_at(condition.line)
    return statement is not None and frame.line > (statement.end_lineno or condition.line)

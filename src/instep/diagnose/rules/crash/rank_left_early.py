"""A rank came to its end while the others still needed it.

## What it sees
One rank ended without an error; another broke off with an error about a closed connection, in a later batch or step.

## Why it matters
The end of a process closes its connections, so the others fail in their next collective. Their errors name the victim.

## What to do
Let every rank do the same number of steps: equal numbers of batches, one decision about the end for all.

## When it is wrong
When a network broke off after the first rank had ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.data_facts import find_uneven_lap, made_uneven_at
from instep.diagnose.ends import BrokenOff, deciding_exit, describe_end, exit_site, find_broken_off, find_way_out
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.hang.uneven_batches import cite_counts, describe_counts
from instep.diagnose.run_view import RunView
from instep.diagnose.stop_requests import find_stop_request
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    broken_off = find_broken_off(run)
    victims = {one.view.rank for one in broken_off}
    left = [view for view in run.ranks if view.exit_code == 0 and not view.is_alive and view.rank not in victims]
    if not left or not broken_off or run.stall is not None:
        return
    first, off = left[0], broken_off[0]
    victim, frames = off.view, off.frames
    ended_first = _ended_first(first, off)
    if victim.failure is None and not ended_first:
        return  # it has handled the error, which may have had another reason
    uneven = find_uneven_lap(run)
    called = deciding_exit(first)
    stop = find_stop_request(run) if uneven is None else None
    known = made_uneven_at(run, uneven) if uneven is not None else stop.where if stop is not None else called
    guess, ways = (None, 0) if uneven is not None or known is not None else find_way_out(first, frames)
    where = known or guess or exit_site(first)
    title = (
        describe_counts(uneven)
        if uneven
        else f"rank {first.rank} ended after {first.num_steps} steps, rank {victim.rank} was in step {victim.num_steps + 1}"
    )
    yield Finding(
        id="crash/rank-left-early",
        title=title,
        cause=f"{describe_end(first)} while rank {victim.rank} still needed it"
        + (f" at {short(frames[0].site)}." if frames else ".")
        + (f" {stop.cause}" if stop is not None else ""),
        fix=(
            stop.fix if stop is not None else "let every rank do the same number of steps",
            _advise(where, ways),
        ),
        evidence=(
            *(cite_counts(run, uneven) if uneven else ()),
            *(stop.cite(run) if stop is not None else ()),
            first.cite(f"rank {first.rank} ended after {first.num_steps} steps, without an error"),
            victim.cite(f"rank {victim.rank}: {off.message[:120]}", "failure.json"),
        ),
        certainty="certain" if uneven or ended_first else "likely",
        ranks=tuple(view.rank for view in left),
        where=where or (frames[0].site if frames else None),
        explains=("crash/*", "hang/*", "numbers/ranks-apart"),
    )


def _advise(where: CallSite | None, ways: int) -> str:
    """ways: out of the loop in which the other rank still was; 0 where the line is known without looking for one."""
    if where is None:
        return "look at what decides about the end of the loop"
    if ways > 1:
        return f"look at the {ways} ways out of the loop, at {short(where)} first; which of them it took is not known"
    return f"look at {short(where)}, the only way out of the loop before its end" if ways else f"change {short(where)}"


def _ended_first(first: RankView, off: BrokenOff) -> bool:
    """Whether it had begun to end, with code 0, before the other's failure, on one machine: no network is between."""
    notes = [event.time for event in first.events if event.name in ("exit-called", "end", "ended")]
    if first.page is None or not off.when or first.place != off.view.place:
        return False
    ended = [first.page.by_wall_clock(time) for time in notes] + [float((first.exit or {}).get("ended_at") or off.when)]
    return min(ended) < off.when

"""A run that was broken off from outside before the launcher had judged it: whether its ranks stood still at that time.

Nobody had asked the ranks where they were, so that only their pages tell, and nothing counts as proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from instep.records import recording as layout
from instep.records.recording import Mark, Page

STILL_SECONDS = 10.0  # without a mark, at the end; the steps of a healthy run are shorter
_FROM_OUTSIDE = ("interrupted", "terminated")


def find_last_stall(pages: Mapping[int, Page], exits: dict[str, Any] | None, alive: bool) -> dict[str, Any] | None:
    """What stall.json would have told. exits: what the launcher left at its end, None when it was killed too."""
    moments = {rank: at for rank, page in pages.items() if (at := _broken_off_at(page, exits, alive)) is not None}
    if len(moments) < len(pages) or not pages:
        return None
    newest = {rank: _newest_mark(page, moments[rank]) for rank, page in pages.items()}
    ended = [rank for rank, mark in newest.items() if mark is not None and mark.kind == "ended"]
    there = {rank: mark for rank, mark in newest.items() if mark is not None and rank not in ended}
    waiting = [rank for rank, mark in there.items() if _waits(mark, pages[rank])]
    still = min((moments[rank] - mark.when for rank, mark in there.items()), default=0.0)
    if not waiting or still < STILL_SECONDS or len(there) + len(ended) < len(pages):
        return None
    return {
        "since": max(mark.when for mark in there.values()),
        "waiting": waiting,
        "outside": [rank for rank in there if rank not in waiting],
        "ended": ended,
        "proven": False,
        "seen_at": max(moments.values()),
        "ranks": [],
    }


def _broken_off_at(page: Page, exits: dict[str, Any] | None, alive: bool) -> float | None:
    """By the rank's monotonic clock; None for a run that came to an end of its own, or goes on."""
    if exits is None:
        return page.beat if page.beat and not alive else None
    stop: dict[str, Any] = exits.get("stop") or {}
    return page.by_own_clock(stop["at"]) if stop.get("reason") in _FROM_OUTSIDE else None


def _newest_mark(page: Page, moment: float) -> Mark | None:
    marks = [mark for mark in page.marks(256) if not mark.flags & layout.OTHER_THREAD and mark.when <= moment]
    return marks[-1] if marks else None


def _waits(mark: Mark, page: Page) -> bool:
    return mark.kind == "enter-collective" or (mark.kind == "enter-backward" and bool(page.pending))

"""A wait that the backend itself gave up, by the timeout of its group: a stall, which ended with an error of the rank that waited.

The error names the victim. What the others did meanwhile is told by the same rules as any other stall.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from instep.records import recording as layout
from instep.records.event import Event
from instep.records.recording import Mark, Page

_GAVE_UP = re.compile(r"timed out waiting|failed to pass monitoredbarrier|wait timeout after", re.IGNORECASE)
_WAITS = ("enter-collective", "enter-backward", "enter-forward")


def find_timed_out(pages: Mapping[int, Page], events: Mapping[int, list[Event]]) -> dict[str, Any] | None:
    """What stall.json would have told just before the first rank gave up; None when none did."""
    gave_up = {rank: event for rank, rows in events.items() if (event := _giving_up(rows)) is not None}
    if not gave_up or len(pages) < 2:
        return None
    moment = min(event.time for event in gave_up.values())
    newest = {rank: mark for rank, page in pages.items() if (mark := _newest_before(page, moment)) is not None}
    ended = [rank for rank, mark in newest.items() if mark.kind == "ended"]
    waiting = [rank for rank, mark in newest.items() if mark.kind in _WAITS]
    if not waiting:
        return None
    return {
        "since": max(newest[rank].when for rank in waiting),
        "waiting": waiting,
        "outside": [rank for rank in newest if rank not in (*waiting, *ended)],
        "ended": ended,
        "proven": False,
        "seen_at": moment,
        "timed_out": True,
        "ranks": [],
    }


def _giving_up(rows: list[Event]) -> Event | None:
    """The last exception of a rank, when it says so: an earlier one was handled."""
    raised = [event for event in rows if event.name == "raised"]
    return raised[-1] if raised and _GAVE_UP.search(raised[-1]["message"]) else None


def _newest_before(page: Page, moment: float) -> Mark | None:
    marks = [mark for mark in page.marks() if not mark.flags & layout.OTHER_THREAD and mark.when <= moment]
    return marks[-1] if marks else None

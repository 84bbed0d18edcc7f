"""Collectives of the default group that a thread beside the main one starts."""

from __future__ import annotations

from dataclasses import dataclass

from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records import recording as layout
from instep.records.finding import CallSite
from instep.records.recording import Mark


@dataclass(frozen=True)
class Threaded:
    """ranks: where a thread does so; site: the line of one of them; operation: what it does there."""

    ranks: tuple[int, ...]
    site: CallSite
    operation: str


def find_threaded(run: RunView) -> Threaded | None:
    """None when one thread alone of each rank speaks to the others: then the order is that of the program."""
    found: dict[int, tuple[CallSite, str]] = {}
    for view in run.ranks:
        marks = _of_other_threads(view)
        site = view.site(marks[-1].site) if marks else None
        if site is not None and _has_own(view):
            found[view.rank] = site, marks[-1].operation
    if not found:
        return None
    site, operation = next(iter(found.values()))
    return Threaded(tuple(found), site, operation)


def _of_other_threads(view: RankView) -> list[Mark]:
    marks = view.page.marks() if view.page is not None else []
    return [mark for mark in marks if mark.flags & layout.OTHER_THREAD and _is_collective(mark)]


def _has_own(view: RankView) -> bool:
    """Whether the main thread uses the group too, after it was made."""
    position = view.position
    return (position is not None and position.waits and position.operation != "init_process_group") or any(
        _is_collective(mark) or mark.kind in ("enter-backward", "enter-forward") for mark in view.marks
    )


def _is_collective(mark: Mark) -> bool:
    made = mark.operation in (
        "init_process_group",
        "destroy_process_group",
        "new_group",
        "wait",
        *layout.POINT_TO_POINT,
    )
    return mark.kind == "enter-collective" and not made and not mark.flags & layout.OTHER_GROUP

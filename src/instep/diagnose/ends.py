"""How a rank came to its end with exit code 0 while others still worked, and what led it out of that work."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from instep.diagnose.branches import conditions_of, find_handler, likeliest, ways_out
from instep.diagnose.frames import Frame
from instep.diagnose.naming import short
from instep.diagnose.rank_view import ECHO, RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite


@dataclass(frozen=True)
class BrokenOff:
    """A rank that got an error about a closed connection. frames: where it was, innermost first; when: by the wall clock."""

    view: RankView
    message: str
    frames: tuple[Frame, ...]
    when: float


def find_broken_off(run: RunView) -> list[BrokenOff]:
    """Ranks that failed so; where none did, those that got such an error last and did nothing more, as where the script
    catches all errors and ends well."""
    failed = [view for view in run.ranks if view.failure is not None and view.echoes]
    if failed or any(view.failure is not None for view in run.ranks):
        return [BrokenOff(view, (view.error or {})["message"], view.main_frames, _failed_at(view)) for view in failed]
    found = [(view, view.last("raised")) for view in run.ranks if view.page is not None]
    return [
        BrokenOff(view, event["message"], _frame_at(view, event), view.page.by_wall_clock(event.time))  # type: ignore[union-attr]
        for view, event in found
        if event is not None and ECHO.search(event["message"]) and not _went_on(view, event.time)
    ]


def _failed_at(view: RankView) -> float:
    error: dict[str, Any] = (view.failure or {}).get("error") or {}
    return float(error.get("time", 0.0))


def _went_on(view: RankView, time: float) -> bool:
    """Whether the rank did more than to come to its end."""
    later = (mark for mark in view.marks if mark.when > time and mark.kind.startswith("enter"))
    return any(mark.operation != "destroy_process_group" for mark in later)


def _frame_at(view: RankView, event: Event) -> tuple[Frame, ...]:
    """The line of the call that the error came out of; who called it was not noted."""
    site = view.site(event["site"])
    return (Frame(site.file, site.line, ""),) if site is not None else ()


def exit_site(view: RankView) -> CallSite | None:
    """Where a rank called `sys.exit` or `os._exit` itself."""
    event = view.last("exit-called")
    return CallSite(event["file"], event["line"], event["source"]) if event is not None else None


def deciding_exit(view: RankView) -> CallSite | None:
    """The same, where a condition leads to it; `sys.exit(main())` at the end of a script tells nothing."""
    site = exit_site(view)
    source = load(site.file) if site is not None else None
    if site is None or source is None:
        return site
    tests = [ast.unparse(test) for _, test in conditions_of(source, site.line)]
    return site if any("__name__" not in test for test in tests) else None


def describe_end(view: RankView) -> str:
    site = exit_site(view)
    if site is not None:
        return f"Rank {view.rank} ended itself at {short(site)}, with exit code 0,"
    how = "came to its end in good order" if view.reached_end else "ended with exit code 0, in the middle of its work,"
    return f"Rank {view.rank} {how}"


def find_way_out(ended: RankView, frames: tuple[Frame, ...]) -> tuple[CallSite | None, int]:
    """What may have led the rank that ended out of the work in which another, with these frames, still was; and how many
    such ways a loop has. A rank that made no step did not come into the loop at all."""
    if not ended.num_steps:
        left = _left_function(frames)
        if left is not None:
            return left, 0
    return _left_loop(frames)


def _left_function(frames: tuple[Frame, ...]) -> CallSite | None:
    """A condition that returns before the line is reached."""
    for frame in frames:
        source = load(frame.file)
        for node, _ in conditions_of(source, frame.line) if source is not None else ():
            is_before = isinstance(node, ast.If) and (node.end_lineno or frame.line) < frame.line
            if source is not None and is_before and isinstance(node.body[-1], ast.Return):  # type: ignore[attr-defined]
                return source.site(node)
    return None


def _left_loop(frames: tuple[Frame, ...]) -> tuple[CallSite | None, int]:
    """What ends the loop around a line: a condition, or an exception that is caught around it."""
    for frame in frames:
        source = load(frame.file)
        if source is None:
            continue
        for loop in source.loops_at(frame.line):
            ways = list(ways_out(source, loop))
            if ways:
                return source.site(likeliest(source, ways)), len(ways)
        handler = find_handler(source, frame.line, 0)
        if handler is not None:
            return handler, 1
    return (_caught_further_out(frames), 0)


def _caught_further_out(frames: tuple[Frame, ...]) -> CallSite | None:
    """An `except` around the whole of it, behind which the program ends in good order."""
    source = load(frames[-1].file) if frames else None
    return find_handler(source, frames[-1].line) if source is not None else None

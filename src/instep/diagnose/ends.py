"""How a rank came to its end with exit code 0 while others still worked, and what led it out of that work."""

from __future__ import annotations

import ast

from instep.diagnose.branches import conditions_of, find_handler, likeliest, ways_out
from instep.diagnose.frames import Frame
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.source import load
from instep.records.finding import CallSite


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
    return None, 0

"""Wrapped models of the ranks, side by side."""

from __future__ import annotations

from functools import cache

from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event

MIN_PAST_STEPS = 3  # one step past the wrapper may be part of a set-up
_APART = 1e-3  # relative; averaged gradients and equal updates give equal bits on one kind of machine


def wraps(view: RankView) -> dict[int, Event]:
    """The noted models by their number; a number is given anew when a script wraps very often."""
    return {event["wrapper"]: event for event in view.named("wrap")}


def same_group(run: RunView, wrapper: int) -> list[RankView]:
    """Ranks that share one wrapped model."""
    found = [(view, wraps(view).get(wrapper)) for view in run.ranks]
    groups = {tuple(event["ranks"] or range(run.world_size)) for _, event in found if event is not None}
    if len(groups) != 1:
        return []
    members = next(iter(groups))
    return [view for view, event in found if event is not None and view.rank in members]


def averages_otherwise(view: RankView, wrapper: int) -> bool:
    """Whether the script averages parameters itself, has its own communication hook, or lets ranks end at different
    times (`Join`), so that equal steps need not have equal parameters."""
    if view.named("join"):
        return True
    return any(event["wrapper"] == wrapper for event in (*view.named("averaged-by-hand"), *view.named("comm-hook")))


def past_wrapper(view: RankView) -> list[Event]:
    """Steps of a rank whose gradients came of a forward past the wrapper, which averages nothing."""
    events = view.named("forward-past-wrapper")
    return [event for event in events if not averages_otherwise(view, event["wrapper"])]


def find_past_wrapper(run: RunView) -> tuple[int, ...]:
    """The ranks that train past the wrapper, where others do not: these wait for averages in which the first take no part."""
    ranks = tuple(view.rank for view in run.ranks if len(past_wrapper(view)) >= MIN_PAST_STEPS)
    return ranks if 0 < len(ranks) < run.world_size else ()


@cache
def find_apart(run: RunView) -> tuple[int, int, str, float] | None:
    """Wrapper, step, first parameter and relative difference where the ranks' parameters part for good."""
    if not run.is_whole or run.world_size < 2:
        return None
    for wrapper in sorted({number for view in run.ranks for number in wraps(view)}):
        views = same_group(run, wrapper)
        if len(views) < 2 or any(averages_otherwise(view, wrapper) for view in views):
            continue
        found = _first_apart(views, wrapper)
        if found is not None:
            return (wrapper, *found)
    return None


def _first_apart(views: list[RankView], wrapper: int) -> tuple[int, str, float] | None:
    tables = [_by_step(view, wrapper) for view in views]
    common = sorted(step for step in tables[0] if all(step in table for table in tables))
    parted: tuple[int, str, float] | None = None
    for step in common:
        difference = _largest(views, wrapper, [table[step] for table in tables])
        if difference is None:
            parted = None  # together again: the script averages now and then
        elif parted is None:
            parted = (step, *difference)
    return parted


def _by_step(view: RankView, wrapper: int) -> dict[int, list[float | None]]:
    changes = [event for event in (*view.named("load"), *view.named("module-changed")) if event["wrapper"] == wrapper]
    return {
        event.step: event["values"]
        for event in view.named("fingerprint")
        if event["wrapper"] == wrapper and not any(_just_before(change, event) for change in changes)
    }


def _just_before(change: Event, event: Event) -> bool:
    """Whether no step lies between: what is loaded after training, to be looked at or saved, is nobody's fault."""
    return change.step == event.step and change.time < event.time


def _largest(views: list[RankView], wrapper: int, rows: list[list[float | None]]) -> tuple[str, float] | None:
    """First parameter whose numbers differ between ranks, compared by name."""
    named: list[dict[str, float | None]] = []
    for view, row in zip(views, rows):
        names = wraps(view)[wrapper]["names"]
        named.append(dict(zip(names, row)))
    for name in named[0]:
        values = [value for table in named if (value := table.get(name)) is not None]
        if len(values) == len(named) and (gap := _gap(values)) > _APART:
            return name, gap
    return None


def _gap(values: list[float]) -> float:
    size = max(abs(value) for value in values)
    return (max(values) - min(values)) / size if size > 1e-12 else 0.0

"""Worker processes of a data loader are started anew for every epoch.

## What it sees
The time from the start of each pass over the data to its first batch, for a loader with workers that are not persistent.

## Why it matters
Short epochs spend a good part of their time on starting processes.

## What to do
Pass `persistent_workers=True` to the loader.

## When it is wrong
Data sets that have to be opened anew in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.data_facts import loaders_by_key
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Finding

MIN_PASSES = 4
MIN_SHARE = 0.3  # of the time of the passes
MIN_SECONDS = 2.0
MIN_OF_WAITING = 0.6  # of all waiting for batches: then that is why the rank waits


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks[:1]:
        for loader in loaders_by_key(view).values():
            laps = _later_laps(view, loader)
            spent, total = sum(lap["first_seconds"] for lap in laps), sum(lap["seconds"] for lap in laps)
            if len(laps) >= MIN_PASSES - 1 and spent >= max(MIN_SECONDS, MIN_SHARE * total):
                yield _finding(view, loader, laps, spent, total)
                return


def _later_laps(view: RankView, loader: Event) -> list[Event]:
    """Passes after the first that were trained on, of a loader whose workers end with each pass."""
    if not loader["workers"] or loader["persistent"]:
        return []
    laps = [lap for lap in view.named("lap") if lap["loader"] == loader["loader"] and lap["backwards"]]
    return [lap for lap in laps[1:] if "first_seconds" in lap.facts]


def _finding(view: RankView, loader: Event, laps: list[Event], spent: float, total: float) -> Finding:
    where = view.site(loader["site"])
    each = spent / len(laps)
    waited = view.page.seconds["data"] if view.page is not None else 0.0
    return Finding(
        id="speed/workers-restarted",
        title=f"{spent / total:.0%} of each epoch goes into starting the data loader's workers ({each:.2f} s)",
        cause=f"The loader made at {short(where)} has {loader['workers']} workers that end with each pass and are started again.",
        fix=(
            f"pass persistent_workers=True at {short(where)} (up to {total / max(total - spent, 0.05 * total):.1f} times as fast)",
        ),
        evidence=(view.cite(f"{len(laps)} passes: {spent:.2f} s of {total:.2f} s before their first batch"),),
        certainty="likely",
        where=where,
        explains=("speed/input-bound",) if spent >= MIN_OF_WAITING * waited else (),
    )

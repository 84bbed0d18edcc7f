"""Every epoch goes through the data in the same order.

## What it sees
A DistributedSampler that shuffles and was gone through several times with the same epoch number.

## Why it matters
It shuffles with seed + epoch. Without `set_epoch` the order of the first epoch comes again and again: the same samples meet in the same batches for the whole training.

## What to do
Call `sampler.set_epoch(epoch)` at the start of every epoch.

## When it is wrong
A loader that is rightly gone through twice in one epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.data_facts import loader_keys, loaders_by_key
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks[:1]:
        for event in loaders_by_key(view).values():
            laps = _trained_laps(view, event)
            if len(laps) >= 2 and event.get("shuffles") and _same_epoch(laps) and _same_order(laps):
                yield _finding(view, event, laps)
                return


def _trained_laps(view: RankView, event: Event) -> list[Event]:
    keys = loader_keys(view)
    laps = [lap for lap in view.named("lap") if keys.get(lap["loader"]) == keys[event["loader"]]]
    return [lap for lap in laps if lap["backwards"] >= 2 and lap["exhausted"]]


def _same_epoch(laps: list[Event]) -> bool:
    return len({lap["epoch"] for lap in laps}) == 1 and laps[0]["epoch"] is not None


def _same_order(laps: list[Event]) -> bool:
    """By the indices that the sampler gave; nothing is known of them for data sets without indices."""
    return len({(lap["order"], lap["batches"]) for lap in laps}) == 1 and laps[0]["order"] != 0


def _finding(view: RankView, event: Event, laps: list[Event]) -> Finding:
    where = view.site(event.get("sampler_site")) or view.site(event["site"])
    loop = view.site(laps[0]["site"])
    return Finding(
        id="numbers/same-order",
        title=f"all {len(laps)} epochs went through the data in the same order",
        cause=f"The sampler made at {short(where)} shuffles with seed + epoch, and its epoch stayed {laps[0]['epoch']}: set_epoch was not called.",
        fix=(f"call sampler.set_epoch(epoch) before the loop at {short(loop)}",),
        evidence=tuple(
            view.cite(f"pass {lap['lap']}: epoch {lap['epoch']}, {lap['batches']} batches, order {lap['order']:x}")
            for lap in laps[:3]
        ),
        certainty="certain",
        where=where,
    )

"""Every epoch goes through the data in the same order.

## What it sees
A sampler that shuffles, and passes over it that all drew the same order: with the same epoch number, or with a generator that was seeded
anew before each pass.

## Why it matters
The order of DistributedSampler is a function of its seed and its epoch. Without `set_epoch` every epoch has the same batches, which learns worse, and nothing shows it.

## What to do
Call `sampler.set_epoch(epoch)` before each epoch; make a generator once, before the loop over epochs.

## When it is wrong
One pass over the data, or a fixed order that is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from instep.diagnose.data_facts import loader_keys
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import CallSite, Certainty, Finding


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks[:1]:
        for event, laps in _passes(view):
            if len(laps) < 2 or not _same_order(laps) or not _same_models(view, laps):
                continue
            if event.get("shuffles") and _same_epoch(laps):
                yield _stayed(view, event, laps)
            elif event.get("random"):
                yield _seeded_anew(view, event, laps)
            elif event.get("by_epoch") and not event.get("replicas"):
                yield _not_told(view, event, laps)
            else:
                continue
            return


def _passes(view: RankView) -> Iterator[tuple[Event, list[Event]]]:
    """Loaders that were made at one line over data of one length, with their passes of training."""
    keys = loader_keys(view)
    groups: dict[tuple[Any, Any], list[tuple[Event, Event]]] = defaultdict(list)
    loaders = {event["loader"]: event for event in view.named("loader")}
    for lap in view.named("lap"):
        event = loaders.get(lap["loader"])
        if event is not None and lap["backwards"] >= 2 and lap["exhausted"] and lap["order"]:
            groups[(keys[lap["loader"]][:2], event["length"])].append((event, lap))
    for rows in groups.values():
        yield rows[0][0], [lap for _, lap in rows]


def _same_epoch(laps: list[Event]) -> bool:
    return len({lap["epoch"] for lap in laps}) == 1 and laps[0]["epoch"] is not None


def _same_order(laps: list[Event]) -> bool:
    """By the indices that the sampler gave; nothing is known of them for data sets without indices."""
    return len({(lap["order"], lap["batches"]) for lap in laps}) == 1 and laps[0]["order"] != 0


def _same_models(view: RankView, laps: list[Event]) -> bool:
    """Whether no model was wrapped between the passes: trials that all begin from the same seed are no epochs."""
    return not any(laps[0].time < event.time < laps[-1].time for event in view.named("wrap"))


def _stayed(view: RankView, event: Event, laps: list[Event]) -> Finding:
    where = view.site(event.get("sampler_site")) or view.site(event["site"])
    loop = view.site(laps[0]["site"])
    cause = f"The sampler made at {short(where)} shuffles with seed + epoch, and its epoch stayed {laps[0]['epoch']}: set_epoch was not called."
    return _finding(view, laps, where, cause, f"call sampler.set_epoch(epoch) before the loop at {short(loop)}")


def _not_told(view: RankView, event: Event, laps: list[Event]) -> Finding:
    where = loop = view.site(laps[0]["site"])
    made = view.site(event["site"])
    cause = f"The sampler of the loader made at {short(made)} has a set_epoch, which decides about its order, and drew the same order in each pass."
    fix = f"call set_epoch(epoch) of the sampler before the loop at {short(loop)}"
    return _finding(view, laps, where, cause, fix, "likely")  # a sampler of the script's own may have a fixed order


def _seeded_anew(view: RankView, event: Event, laps: list[Event]) -> Finding:
    where = view.site(event["site"])
    cause = f"The loader made at {short(where)} shuffles with a generator that had the same state at the beginning of each pass: it is seeded anew for every epoch."
    fix = "make the generator (or the loader) once before the loop over epochs, or seed it with seed + epoch"
    return _finding(view, laps, where, cause, fix)


def _finding(
    view: RankView,
    laps: list[Event],
    where: CallSite | None,
    cause: str,
    fix: str,
    certainty: Certainty = "certain",
) -> Finding:
    return Finding(
        id="numbers/same-order",
        title=f"all {len(laps)} epochs went through the data in the same order",
        cause=cause,
        fix=(fix,),
        evidence=tuple(
            view.cite(f"pass {number}: epoch {lap['epoch']}, {lap['batches']} batches, order {lap['order']:x}")
            for number, lap in enumerate(laps[:3], 1)
        ),
        certainty=certainty,
        where=where,
    )

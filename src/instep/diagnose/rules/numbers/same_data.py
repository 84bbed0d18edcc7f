"""Every rank trains on the same batches.

## What it sees
Prints of the batches that gradients were computed from: equal on all ranks, batch after batch. Where batches are cut by hand, prints of
what the wrapped model was called with.

## Why it matters
The ranks compute the same gradient, so their average is that of one process: N devices do the work of one, and an epoch has as many steps as on one device.

## What to do
Give the loader a DistributedSampler and call `sampler.set_epoch(epoch)`, or let each rank read its own part.

## When it is wrong
Models split by tensor or pipeline parallelism get the same data rightly; nothing is said unless a model is wrapped in DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.data_facts import Key, loader_keys, loaders_by_key
from instep.diagnose.input_facts import find_cut, find_equal_inputs
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.sample_facts import is_data_parallel
from instep.records import recording as layout
from instep.records.event import Event
from instep.records.finding import CallSite, Evidence, Finding

MIN_BATCHES = 6  # equal on all ranks, before it is called the same data


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2 or not all(is_data_parallel(run, view) for view in run.ranks):
        return
    tables = [_trained_batches(view) for view in run.ranks]
    for key in sorted({place[0] for place in tables[0]}):
        places = [place for place in tables[0] if place[0] == key and all(place in table for table in tables)]
        same = [place for place in places if _equal([table[place] for table in tables])]
        contents = {tables[0][place] for place in same}
        if len(same) < MIN_BATCHES or len(same) < 0.9 * len(places) or len(contents) < len(same) // 2:
            continue
        yield _finding(run, key, len(same), len(places))
        return
    if not any(lap["backwards"] for view in run.ranks for lap in view.named("lap")):
        yield from _cut_by_hand(run)


def _cut_by_hand(run: RunView) -> Iterator[Finding]:
    found = find_equal_inputs(run)
    where = find_cut(found[2]) if found is not None else None
    if found is None or where is None:
        return
    same, seen, call = found
    yield Finding(
        id="numbers/same-data",
        title=f"all ranks train on the same batches ({same} of {seen} compared)",
        cause=f"The model at {short(call)} gets the same inputs on every rank: {short(where)} takes them from the data without regard to the rank. "
        "The ranks compute the same gradients, so more of them gain nothing.",
        fix=(f"take each rank's own part at {short(where)}, as data[rank::world_size], or draw with seed + rank",),
        evidence=tuple(
            Evidence(
                f"inputs of the model on rank {one.rank} equal those of rank 0",
                f"rank{one.rank}/events.jsonl",
                one.rank,
            )
            for one in run.ranks[1:3]
        ),
        certainty="likely",
        where=where,
    )


def _trained_batches(view: RankView) -> dict[tuple[Key, int, int], tuple[int, ...]]:
    """Prints by loader, pass and place in the pass, of batches that were trained on."""
    if view.page is None:
        return {}
    keys = loader_keys(view)
    rows = (one for one in view.page.batch_prints() if one.flags & layout.TRAINED and one.loader in keys)
    return {(keys[row.loader], row.lap, row.index): row.prints for row in rows if any(row.prints)}


def _equal(prints: list[tuple[int, ...]]) -> bool:
    """Whether all that could be told of the batches is equal, or their targets are (inputs may be augmented at random)."""
    return len(set(prints)) == 1


def _finding(run: RunView, key: Key, same: int, seen: int) -> Finding:
    view = run.ranks[0]
    event = loaders_by_key(view)[key]
    where = view.site(event["site"])
    sampler = event["sampler"]
    ranks_of = {one.rank: loaders_by_key(one).get(key) for one in run.ranks}
    taken = {rank: row.get("sampler_rank") for rank, row in ranks_of.items() if row is not None}
    wrong = [rank for rank, other in taken.items() if other not in (None, rank)]
    site = view.site(event.get("sampler_site")) or where
    streams = event["length"] is None  # an iterable data set, of which no sampler takes a part
    if wrong:
        cause = f"The sampler made at {short(site)} was told rank {taken[wrong[0]]} on rank {wrong[0]}."
    elif streams:
        cause = (
            f"The loader made at {short(where)} reads {event['dataset']}, which gives the same stream on every rank."
        )
    elif event.get("replaces"):
        cause = (
            f"The loader made at {short(where)} draws with {sampler}, whose random numbers are the same on every rank."
        )
    else:
        cause = f"The loader made at {short(where)} draws with {sampler}, which gives every rank the whole data set in the same order."
    return Finding(
        id="numbers/same-data",
        title=f"all ranks train on the same batches ({same} of {seen} compared)",
        cause=f"{cause} The ranks compute the same gradients, so more of them gain nothing.",
        fix=(_what_to_do(event, streams, site if wrong else where, bool(wrong)),),
        evidence=tuple(
            Evidence(f"batches of rank {one.rank} equal those of rank 0", f"rank{one.rank}/page.bin", one.rank)
            for one in run.ranks[1:3]
        ),
        certainty="certain",
        ranks=tuple(wrong),
        where=site if wrong else where,
        explains=(),
    )


def _what_to_do(event: Event, streams: bool, where: CallSite | None, is_wrong: bool) -> str:
    if is_wrong:
        return f"pass this process's own rank to the sampler at {short(where)}, or leave rank= out"
    if streams:
        return f"in {event['dataset']}.__iter__ take every world_size-th sample (or file) from this process's rank on"
    if event.get("replaces"):
        return f"draw with another seed on each rank at {short(where)}, as generator=torch.Generator().manual_seed(seed + rank), and len(dataset) // world_size samples"
    return (
        f"give the loader at {short(where)} a DistributedSampler(dataset), without shuffle=, and call set_epoch(epoch)"
    )

"""Every rank goes through the whole data set in each epoch.

## What it sees
A loader that shuffles by itself over data that are the same on all ranks: in one pass of training each rank took nearly all samples,
in an order of its own.

## Why it matters
The data are not shared out. With N ranks an epoch takes as many steps as with one and shows every sample N times, so that more ranks
bring no speed, and schedules, checkpoints and "epochs" mean N times as much training as they say.

## What to do
Give the loader a DistributedSampler and call `sampler.set_epoch(epoch)` before each epoch.

## When it is wrong
Every rank is meant to see everything, and epochs are counted accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.sample_facts import SharedLoader, shared_loaders
from instep.records.finding import Finding

MIN_OVERLAP = 0.9  # of the samples of two ranks
MIN_SHARE = 0.8  # of the data set, in one pass: the last batch may be dropped


def check(run: RunView) -> Iterator[Finding]:
    for shared in shared_loaders(run):
        if _takes_all(shared):
            yield _finding(run, shared)
            return


def _takes_all(shared: SharedLoader) -> bool:
    own_order = len({lap["order"] for lap in shared.laps}) == len(shared.laps)
    shuffles = all(row.get("random") and not row.get("replaces") and not row.get("replicas") for row in shared.loaders)
    lengths = [row["length"] or 0 for row in shared.loaders]
    whole = all(lap["samples"] >= MIN_SHARE * length > 0 for lap, length in zip(shared.laps, lengths))
    return own_order and shuffles and whole and shared.overlap >= MIN_OVERLAP and not shared.has_repeats


def _finding(run: RunView, shared: SharedLoader) -> Finding:
    view = run.ranks[0]
    where, length = view.site(shared.loaders[0]["site"]), shared.loaders[0]["length"]
    return Finding(
        id="numbers/whole-set-on-every-rank",
        title=f"each of the {run.world_size} ranks goes through all {length} samples in every epoch",
        cause=f"The loader made at {short(where)} shuffles the whole data set on every rank, each in an order of its own: an epoch has as many "
        f"steps as with one process and shows each sample {run.world_size} times.",
        fix=(
            f"give the loader at {short(where)} a DistributedSampler(dataset), without shuffle=, and call set_epoch(epoch): "
            f"an epoch then takes 1/{run.world_size} of the steps",
        ),
        evidence=tuple(
            one.cite(f"rank {one.rank}: {lap['samples']} samples of {length} in one pass")
            for one, lap in list(zip(run.ranks, shared.laps))[:4]
        ),
        certainty="likely",
        where=where,
    )

"""The ranks' parts of the data overlap.

## What it sees
Loaders over subsets of the same data that the script cut itself: the numbers of the samples that each rank took in one pass, of which
many are the same on two ranks.

## Why it matters
Together the parts are as large as the data set, so what two ranks both have, no rank has somewhere else: those samples are never trained on.
A usual cause is a shuffle before the cut that every process draws for itself.

## What to do
Draw the order with the same seed on every rank before cutting it, `random.Random(0).shuffle(indices)`, or use a DistributedSampler.

## When it is wrong
Bootstrap samples, which are meant to overlap; they are recognised when a rank draws a sample twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.rules.numbers.splits_differ import find_split
from instep.diagnose.run_view import RunView
from instep.diagnose.sample_facts import SharedLoader, keeps_its_part, shared_loaders
from instep.records.finding import Finding

MIN_OVERLAP, MAX_OVERLAP = 0.1, 0.9  # of two ranks' samples: less is padding, more is the whole set on every rank


def check(run: RunView) -> Iterator[Finding]:
    for shared in shared_loaders(run):
        if any(row.get("replicas") for row in shared.loaders):
            continue  # a sampler's own share; another rule looks at that
        if MIN_OVERLAP < shared.overlap < MAX_OVERLAP and not shared.has_repeats and keeps_its_part(run, shared):
            yield _finding(run, shared)
            return


def _finding(run: RunView, shared: SharedLoader) -> Finding:
    view = run.ranks[0]
    where = find_split(shared.key) or view.site(shared.loaders[0]["site"])
    together = shared.seen[0].union(*shared.seen)
    twice = sum(map(len, shared.seen)) - len(together)
    return Finding(
        id="numbers/parts-overlap",
        title=f"the ranks' parts of the data overlap: {shared.overlap:.0%} of a rank's samples are another rank's as well",
        cause=f"Each rank cuts its part at {short(where)} from an order of its own, so some samples fall to several ranks and others to none.",
        fix=(
            f"draw the order with the same seed on every rank at {short(where)}, as random.Random(0).shuffle(indices) or "
            "torch.randperm(n, generator=torch.Generator().manual_seed(0))",
            "or share the data out with a DistributedSampler",
        ),
        evidence=(
            view.cite(f"of {len(together)} samples that were followed, {twice} were used by more than one rank"),
            *(
                one.cite(f"rank {one.rank}: {lap['samples']} samples in a pass")
                for one, lap in list(zip(run.ranks, shared.laps))[:4]
            ),
        ),
        certainty="certain",
        where=where,
    )

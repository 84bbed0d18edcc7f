"""One rank has used up its data while another still has batches.

## What it sees
A pass over the same data loader that ended after different numbers of batches on different ranks, and a stall after it.

## Why it matters
Each batch ends in a collective (the average of the gradients). The rank with more batches waits there for a rank that has
left the loop.

## What to do
Give every rank the same number of batches: a DistributedSampler, `drop_last=True` on the split, or surplus samples dropped.
`with Join([model]):` around the loop lets ranks finish at different times.

## When it is wrong
A script that pairs collectives of different lines on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.data_facts import UnevenLap, describe_counts, made_uneven_at
from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import Evidence, Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "uneven-batches" or hang.uneven is None:
        return
    uneven = hang.uneven
    where = made_uneven_at(run, uneven)
    yield Finding(
        id="hang/uneven-batches",
        title=describe_counts(uneven),
        cause=f"The loop at {short(uneven.loop)} runs more often on some ranks than on others; each batch ends in a "
        "collective, so the ranks with more batches wait for those that have left the loop.",
        fix=what_to_do(where),
        evidence=(*cite_counts(run, uneven), *cite_positions(run, hang.waiting + hang.outside)),
        certainty="certain" if hang.proven else "likely",
        ranks=uneven.short_ranks,
        where=where or uneven.loop,
        explains=("hang/*", "numbers/*"),
    )


def what_to_do(where: object) -> tuple[str, ...]:
    return (
        f"give every rank the same number of batches{f': change {short(where)}' if where else ''}",  # type: ignore[arg-type]
        "use a DistributedSampler, or drop the surplus samples",
        "or put `with Join([model]):` around the loop",
    )


def cite_counts(run: RunView, uneven: UnevenLap) -> tuple[Evidence, ...]:
    return tuple(
        run.by_rank[rank].cite(
            f"pass {uneven.lap}: {count} batches {'so far' if rank in uneven.running else 'in all'} at {short(uneven.loop)}"
        )
        for rank, count in sorted(uneven.counts.items())[:8]
    )

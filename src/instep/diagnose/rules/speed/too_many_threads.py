"""The ranks together have many more threads than the machine has cores.

## What it sees
The number of threads that the script gave torch on each rank, times the ranks of the machine, beside its cores; and how long the ranks
were ready to run and had no core.

## Why it matters
Threads of one operation wait for each other. When there are not enough cores for all of them, each operation takes as long as its
unluckiest thread.

## What to do
Leave `torch.set_num_threads` out: the launcher gives each rank one thread unless OMP_NUM_THREADS says otherwise. Or pass the number of
cores divided by the number of ranks of the machine.

## When it is wrong
On a machine that others use too.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.time_shares import measure_shares
from instep.records.finding import Finding

MIN_RATIO = 2.0  # threads per core
MIN_DELAYED = 0.05  # of the time, ready and without a core


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        event, shares = view.last("threads"), measure_shares(view)
        if event is None or shares is None:
            continue
        together = event["threads"] * event["local_ranks"]
        delayed = shares.delayed_seconds / shares.total_seconds
        if event["threads"] < 2 or together < MIN_RATIO * event["cores"] or delayed < MIN_DELAYED:
            continue
        where = view.site(event["site"])
        good = max(1, event["cores"] // event["local_ranks"])
        yield Finding(
            id="speed/too-many-threads",
            title=f"{event['local_ranks']} ranks with {event['threads']} threads each share {event['cores']} cores",
            cause=f"{short(where)} gives each rank {event['threads']} threads, {together} in all; they take the cores from each other.",
            fix=(
                f"leave {short(where)} out, or pass {good} (at least {1 / (1 - min(0.9, delayed)):.1f} times as fast)",
            ),
            evidence=(
                view.cite(f"rank {view.rank}: ready to run and without a core for {delayed:.0%} of the time"),
                view.cite(f"{together} threads of {event['local_ranks']} ranks, {event['cores']} cores"),
            ),
            certainty="likely",
            where=where,
            explains=("speed/communication-bound", "speed/straggler", "speed/small-batch"),
        )
        return

"""Most of the time passes between the parts of a step, in the script's own loop.

## What it sees
The share of the time that is in no data loader, forward, backward, optimizer step or collective, on every rank; and the script's line in which
the ranks were seen most of that time.

## Why it matters
While the script makes the next batch, computes statistics or writes logs itself, the devices stand still.

## What to do
Let a data loader with worker processes make the batches; do the rest more seldom, or after training.

## When it is wrong
Work that belongs there. Loops that call a model there, as reinforcement learning does, are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.site_costs import busiest_loop_line
from instep.diagnose.time_shares import Shares, measure_shares
from instep.records.finding import Finding

MIN_OWN = 0.5  # of what a rank does without waiting for others or for a core
MIN_SHARE = 0.3  # that this is of all the time, without waits for a core
MIN_SECONDS = 1.5


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, shares) for view in run.ranks if (shares := measure_shares(view)) is not None]
    if not run.is_whole or not found or len(found) < len(run.ranks) or not all(wraps(view) for view in run.ranks):
        return
    rests = [rest_of(shares) for _, shares in found]
    least = min(rest / max(1e-9, usual_own(shares)) for rest, (_, shares) in zip(rests, found))
    counts = all(usual_own(shares) > MIN_SHARE * (shares.total_seconds - shares.delayed_seconds) for _, shares in found)
    line = busiest_loop_line(found[0][0])
    if least < MIN_OWN or not counts or min(rests) < MIN_SECONDS or line is None:
        return
    if "sleep(" in line[0].source:
        return  # it stands for work of some kind, or waits on purpose
    where, share = line
    spent = least * share
    yield Finding(
        id="speed/rest-of-loop",
        title=f"{least:.0%} of each rank's own time passes between the parts of a step, most of it at {short(where)}",
        cause=f"Without what it waits for others, {least:.0%} of a rank's time is neither in a data loader nor in forward, backward, update or collective; in {share:.0%} of the looks at it the rank was at {short(where)} ({where.source}).",
        fix=(
            f"if {short(where)} makes batches, let a DataLoader with num_workers=2 or more do it; otherwise do it more seldom (up to {1 / max(0.05, 1 - spent):.1f} times as fast)",
        ),
        evidence=tuple(
            view.cite(
                f"rank {view.rank}: {rest:.1f} s of {usual_own(shares):.1f} s of its own between the parts of its steps",
                "page.bin",
            )
            for rest, (view, shares) in list(zip(rests, found))[:4]
        ),
        certainty="likely",
        where=where,
    )


def usual_own(shares: Shares) -> float:
    """Seconds of all steps, as long as the usual one is, without waiting for other ranks or for a core."""
    return shares.usual_own_seconds * shares.steps


def rest_of(shares: Shares) -> float:
    known = shares.data_seconds + shares.forward_seconds + shares.backward_own_seconds + shares.step_seconds
    return max(0.0, usual_own(shares) - known)

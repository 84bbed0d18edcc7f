"""Checkpoints are written so often that training waits for them most of the time.

## What it sees
The time that `torch.save` took on the rank that saves, as a share of the time of the steps, and how often it was called.

## Why it matters
While one rank writes, the others wait for it.

## What to do
Write less often (every few minutes), save in the background, or keep a copy in memory and write that.

## When it is wrong
Short runs of a large model, whose one checkpoint is a good part of the run; several are needed for this to speak.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.site_costs import costs_of
from instep.diagnose.time_shares import measure_shares
from instep.records.finding import Finding
from instep.units import format_seconds

MIN_SAVES = 8
MAX_STEPS_BETWEEN = 50
MIN_SHARE = 0.25
MIN_SECONDS = 1.0


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        shares, saves = measure_shares(view), costs_of(view, "saves")
        if shares is None or not saves:
            continue
        cost, share = saves[0], saves[0].seconds / shares.total_seconds
        if cost.calls < MIN_SAVES or cost.calls * MAX_STEPS_BETWEEN < shares.steps:
            continue
        if share < MIN_SHARE or cost.seconds < MIN_SECONDS:
            continue
        share = min(share, 0.98)
        yield Finding(
            id="speed/checkpoints-too-often",
            title=f"{share:.0%} of the time goes into writing checkpoints: one every {shares.steps / cost.calls:.0f} steps",
            cause=f"{short(cost.site)} wrote {cost.calls} times in {shares.steps} steps, {format_seconds(cost.seconds / cost.calls)} each, and the other ranks wait for rank {view.rank} meanwhile.",
            fix=(
                f"write less often at {short(cost.site)}: once in {_steps_for(cost.seconds / cost.calls, shares.total_seconds / shares.steps, share)} steps costs 2 % (up to {1 / (1 - share):.1f} times as fast)",
            ),
            evidence=(
                view.cite(
                    f"{cost.calls} calls at {short(cost.site)}: {cost.seconds:.2f} s of {shares.total_seconds:.2f} s"
                ),
            ),
            certainty="certain",
            where=cost.site,
            explains=("speed/straggler", "speed/occasional-straggler", "speed/collectives-each-step"),
        )
        return


def _steps_for(save_seconds: float, step_seconds: float, share: float) -> int:
    """Steps between two checkpoints that take 2 % of the time."""
    return max(1, round(save_seconds / max(1e-6, step_seconds * (1 - share)) / 0.02))

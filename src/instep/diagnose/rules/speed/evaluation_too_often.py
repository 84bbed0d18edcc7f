"""Most of the time goes into evaluation.

## What it sees
Passes over data without a backward, several in each epoch, again and again between steps of training: their time as a share of all.

## Why it matters
Evaluation does not train. Every few steps it says little that the one before did not.

## What to do
Evaluate less often, on a part of the set in between, or with a larger batch, which needs no memory for gradients.

## When it is wrong
Short runs whose evaluation is their purpose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.time_shares import measure_shares
from instep.records.event import Event
from instep.records.finding import Finding

MIN_PASSES = 8
MAX_STEPS_BETWEEN = 25
MIN_PER_EPOCH = 1.5  # once after each epoch is usual, however short epochs are
MIN_SHARE = 0.5
MIN_SECONDS = 1.5


def check(run: RunView) -> Iterator[Finding]:
    rows = [(view, _largest(view)) for view in run.ranks]
    if not rows or not all(laps for _, laps in rows):
        return
    found = [(view, laps, _share(view, laps)) for view, laps in rows]
    if any(share is None or share < MIN_SHARE for _, _, share in found):
        return
    view, laps, share = found[0]
    where, spent = view.site(laps[0]["site"]), sum(lap["seconds"] for lap in laps)
    between = (laps[-1].step - laps[0].step) / max(1, len(laps) - 1)
    if spent < MIN_SECONDS or between > MAX_STEPS_BETWEEN or share is None:
        return
    yield Finding(
        id="speed/evaluation-too-often",
        title=f"{share:.0%} of the time goes into evaluation: one every {between:.0f} steps",
        cause=f"The loop at {short(where)} went {len(laps)} times over {laps[0]['batches']} batches without training, {spent / len(laps) * 1e3:.0f} ms each.",
        fix=(
            f"evaluate ten times less often (about {1 / (1 - 0.9 * share):.1f} times as fast), or with larger batches at {short(where)}",
        ),
        evidence=tuple(
            one.cite(f"rank {one.rank}: {len(passes)} evaluations, {sum(lap['seconds'] for lap in passes):.1f} s")
            for one, passes in rows[:4]
        ),
        certainty="likely",
        where=where,
    )


def _largest(view: RankView) -> list[Event]:
    """Passes without training over the loader that took the most time for them, once training had begun."""
    groups: dict[int, list[Event]] = defaultdict(list)
    for lap in view.named("lap"):
        if not lap["backwards"] and lap["exhausted"] and lap.step:
            groups[lap["site"]].append(lap)
    laps = max(groups.values(), key=lambda rows: sum(lap["seconds"] for lap in rows), default=list[Event]())
    epochs = sum(lap["exhausted"] and lap["backwards"] > 0 for lap in view.named("lap"))
    often = len(laps) >= max(MIN_PASSES, MIN_PER_EPOCH * epochs)
    return laps if often and laps[0].step != laps[-1].step else []


def _share(view: RankView, laps: list[Event]) -> float | None:
    shares = measure_shares(view)
    spent = sum(lap["seconds"] for lap in laps)
    return min(0.98, spent / shares.total_seconds) if shares is not None else None

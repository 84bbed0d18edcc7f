"""Gradients are averaged for every micro-batch of an accumulation.

## What it sees
Several backwards with an average between two optimizer steps, and the time that this costs.

## Why it matters
Only the sum is used by the step. Averaging once per step instead of once per micro-batch gives the same result for a fraction of the traffic.

## What to do
Run all but the last micro-batch of a group, forward and backward, under `model.no_sync()`.

## When it is wrong
Scripts that use the averaged gradients in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.time_shares import measure_shares
from instep.records import recording as layout
from instep.records.finding import CallSite, Finding

MIN_SHARE = 0.10  # of the time, that could be saved
MIN_BACKWARDS = 20


def check(run: RunView) -> Iterator[Finding]:
    rows = [(view, found) for view in run.ranks if (found := _averages_per_step(view)) is not None]
    if not rows or len(rows) < len(run.ranks) or run.world_size < 2:
        return
    savings = [_saved_share(view, many) for view, (many, _) in rows]
    known = [share for share in savings if share is not None]
    if not known or min(known) < MIN_SHARE:
        return
    view, (many, where) = rows[0]
    yield Finding(
        id="speed/averaged-every-micro-batch",
        title=f"gradients are averaged {many} times per optimizer step",
        cause=f"Each backward at {short(where)} averages over the ranks, but only the sum of {many} is used; that costs about {min(known):.0%} of the time.",
        fix=(
            f"run forward and backward of all but the last micro-batch under model.no_sync() at {short(where)} (about {1 / (1 - min(known)):.1f} times as fast)",
        ),
        evidence=(
            view.cite(
                f"{many} averages in each of the last optimizer steps, {view.num_steps} steps in all", "page.bin"
            ),
        ),
        certainty="certain",
        where=where,
        explains=("speed/communication-bound",),
    )


def _averages_per_step(view: RankView) -> tuple[int, CallSite | None] | None:
    """How many averages each of the newest steps had, when they agree on more than one for one wrapped model."""
    page = view.page
    if page is None or page.num_steps < 3 or len(_trained_models(view)) != 1:
        return None
    marks = [mark for mark in page.step_marks() if mark.step > 1]
    counts = [two.reduced - one.reduced for one, two in pairwise(marks) if two.step == one.step + 1]
    if not counts or marks[-1].backwards < MIN_BACKWARDS:
        return None
    usual = max(set(counts), key=counts.count)
    if usual < 2 or counts.count(usual) < 0.8 * len(counts):
        return None
    backward = next((mark for mark in reversed(view.marks) if mark.kind == "leave-backward"), None)
    return usual, view.site(backward.site) if backward is not None else None


def _trained_models(view: RankView) -> set[int]:
    """Numbers of the wrapped models that were called with gradients of late."""
    return {mark.count for mark in view.marks if mark.kind == "enter-forward" and not mark.flags & layout.NO_GRAD}


def _saved_share(view: RankView, many: int) -> float | None:
    shares = measure_shares(view)
    return None if shares is None else shares.exposed * (many - 1) / many

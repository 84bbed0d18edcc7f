"""Gradients are not numbers, while the loss was one.

## What it sees
The first optimizer step whose gradients hold NaN or infinity although no loss before it did, and which parameters have good ones.

## Why it matters
The step writes them into the parameters, and from the next one on everything is NaN.

## What to do
Look for a function that is finite where its derivative is not: a square root, norm or standard deviation at 0, arccos at 1, `torch.where`
that hides a NaN. Add a small number inside, as in `sqrt(x + 1e-8)`. When the gradients had grown before, clip them.

## When it is wrong
Scripts that mend gradients in their optimizer. On a GPU a few elements of one parameter are read a step later, after the first 64 steps
only now and then, so that the host need not wait: the step named is the first in which it was seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.nonfinite_source import find_steep
from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.nonfinite.loss import EXPLODED
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import CallSite, Evidence, Finding


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, event) for view in run.ranks for event in view.named("nonfinite-gradient")[:1]]
    losses = [event.step for view in run.ranks for event in view.named("nonfinite-loss")]
    if not found:
        return
    view, event = min(found, key=lambda row: (row[1].step, row[1].time))
    if losses and min(losses) <= event.step:
        return  # the loss was bad first
    backward = next((mark for mark in reversed(view.marks) if mark.kind == "leave-backward"), None)
    here = view.site(backward.site) if backward is not None else view.site(event["site"])
    cause, fix, where = _explain(event, here)
    yield Finding(
        id="nonfinite/gradients",
        title=f"gradients became NaN or infinite in step {event.step + 1}, while the loss was a number",
        cause=cause,
        fix=fix,
        evidence=tuple(_cite(view, event)),
        certainty="likely",
        where=where,
        explains=("nonfinite/loss", "numbers/*"),
    )


def _cite(view: RankView, event: Event) -> Iterator[Evidence]:
    good = f"; good: {', '.join(event['good'][:4])}" if event["good"] else "; no gradient is finite"
    if event.get("late"):
        good = " (one parameter is looked at in a step on a device)"
    yield view.cite(f"step {event.step + 1}: not finite: {', '.join(event['bad'][:4])}{good}")
    sizes = ", ".join(f"{size:.3g}" for _, size in event["history"][-4:])
    if sizes:
        yield view.cite(f"largest sampled element of the gradients before: {sizes}")


def _explain(event: Event, here: CallSite | None) -> tuple[str, tuple[str, ...], CallSite | None]:
    sizes = [size for _, size in event["history"]]
    if len(sizes) >= 3 and min(sizes) > 0 and sizes[-1] > EXPLODED * min(sizes):
        return (
            f"The gradients exploded: their largest element grew from {min(sizes):.3g} to {sizes[-1]:.3g} over {len(sizes)} steps.",
            ("clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "or lower the learning rate"),
            here,
        )
    steep = find_steep(here)
    place = f", and {event['good'][0]} and what follows it are good, so it arose before that" if event["good"] else ""
    if steep is not None:
        return (
            f"The derivative of the function at {short(steep)} is infinite where its argument is 0 (or at the end of its range){place}.",
            (f"add a small number to the argument at {short(steep)}, as in sqrt(x + 1e-8)",),
            steep,
        )
    return (
        f"An operation whose value is finite has a derivative that is not{place}.",
        ("run the step again under torch.autograd.detect_anomaly(), which names the operation",),
        here,
    )

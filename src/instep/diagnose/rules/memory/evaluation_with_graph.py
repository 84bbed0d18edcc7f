"""Evaluation keeps everything that a backward would need, and no backward comes.

## What it sees
A forward in evaluation mode whose output has a graph, in passes over data without a backward, and how many bytes the graph of one batch
keeps.

## Why it matters
The activations of every layer stay in memory until the output goes, so that evaluation needs about as much memory as training does and
more time than it has to. Where outputs or losses are kept, they keep the graphs of all batches.

## What to do
Put the loop under `torch.no_grad()` or `torch.inference_mode()`. `model.eval()` does not switch graphs off.

## When it is wrong
Scripts that need gradients in evaluation mode, as for saliency or adversarial examples; passes with a backward are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Finding
from instep.units import format_bytes

MIN_BYTES = 4 << 20  # of the graph of one batch: less is not worth a word
MIN_SHARE = 0.25  # of the bytes of the parameters


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        events = [event for event in view.named("evaluation-with-graph") if _without_backward(view, event)]
        large = [event for event in events if event["bytes"] >= max(MIN_BYTES, MIN_SHARE * event["parameters"])]
        if not large:
            continue
        event = max(large, key=lambda one: one["bytes"])
        where = view.site(event["site"])
        yield Finding(
            id="memory/evaluation-with-graph",
            title=f"evaluation keeps {format_bytes(event['bytes'])} per batch for a backward that does not come",
            cause=f"The forward at {short(where)} runs in evaluation mode with gradients switched on; model.eval() does not switch them off.",
            fix=(f"put the loop around {short(where)} under torch.no_grad() or torch.inference_mode()",),
            evidence=(
                view.cite(
                    f"after step {event.step}: the graph of one output keeps {format_bytes(event['bytes'])}, the parameters have {format_bytes(event['parameters'])}"
                ),
            ),
            certainty="certain",
            where=where,
        )
        return


def _without_backward(view: RankView, event: Event) -> bool:
    """Whether the pass over data in which it was, or the time to the next step, had no backward."""
    later = [lap for lap in view.named("lap") if lap.time > event.time]
    if later:
        return later[0]["backwards"] == 0
    return view.page is not None and not any(
        mark.kind == "enter-backward" and mark.when > event.time for mark in view.marks
    )

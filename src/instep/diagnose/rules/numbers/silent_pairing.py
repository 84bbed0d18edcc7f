"""Ranks averaged things that do not belong together, and nothing failed.

## What it sees
The first collective in which the ranks meant different things: the gradients of different steps, or different lines.

## Why it matters
Backends pair collectives by count and size, not by meaning. A rank that leaves one out does not hang: from then on its step k
is averaged with step k-1 of the others. The hang comes at the end of training, far from the fault.

## What to do
Let every rank take part in every collective. A batch without anything to learn from still needs a backward that reaches the
parameters: multiply the output by 0 instead of making a new tensor.

## When it is wrong
Scripts in which ranks rightly take part in different collectives of one group.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.data_facts import find_uneven_lap, made_uneven_at
from instep.diagnose.missing import explain_missing, with_odd_rank
from instep.diagnose.pairing import find_mispairing
from instep.diagnose.rules.crash.uneven_collectives import cite, describe
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding

_INNER = ("for an evaluation on one rank call the inner model: model.module(x), whose forward sends nothing",)


def check(run: RunView) -> Iterator[Finding]:
    mispairing = find_mispairing(run)
    if mispairing is None or not mispairing.is_silent or mispairing.sizes_differ:
        return
    mispairing = with_odd_rank(run, mispairing)
    where, why = explain_missing(run, mispairing)
    uneven = find_uneven_lap(run) if where is None else None
    if uneven is not None:
        where, why = made_uneven_at(run, uneven), "The ranks have different numbers of batches."
    consequence = "From then on the ranks average what does not belong together."
    yield Finding(
        id="numbers/silent-pairing",
        title=describe(mispairing),
        cause=f"{why} {consequence}".strip(),
        fix=(
            *(_INNER if any(slot.operation == "buffers" for slot in mispairing.slots) else ()),
            "let every rank take part in every collective; a batch without targets still needs a backward through the model, as (output * 0).sum()",
        ),
        evidence=cite(run, mispairing),
        certainty="certain" if mispairing.odd is not None or uneven is not None else "likely",
        ranks=(mispairing.odd,) if mispairing.odd is not None else (),
        where=where or mispairing.slots[-1].site,
        explains=("hang/*", "crash/*", "numbers/ranks-apart"),
    )

"""The model is called past its wrapper, so gradients are not averaged.

## What it sees
Optimizer steps with gradients for a wrapped model whose wrapper had not been called.

## Why it matters
DistributedDataParallel prepares its averages in its own forward. A loss that comes from `model.module(x)` has gradients of this rank alone, and the ranks drift apart while everything looks well.

## What to do
Call the wrapped model for every forward that a loss is computed from. `model.module` is right for evaluation only.

## When it is wrong
Scripts that average gradients themselves are recognised by their collectives; very unusual ones may not be.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.lines import inner_call
from instep.diagnose.model_facts import MIN_PAST_STEPS, find_past_wrapper, past_wrapper
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    if run.world_size < 2:
        return
    some = find_past_wrapper(run)
    for view in run.ranks:
        events = past_wrapper(view)
        if len(events) < MIN_PAST_STEPS:
            continue
        calls = [event for event in view.named("inner-forward") if event["wrapper"] == events[0]["wrapper"]]
        where = view.site(calls[0]["site"]) if calls else inner_call(view.site(events[0]["site"]))
        yield Finding(
            id="numbers/forward-past-wrapper",
            title=f"gradients were not averaged in {len(events)} steps: the model is called past its wrapper"
            + (f" on {name_ranks(some)}" if some else ""),
            cause=f"The forward at {short(where)} runs the inner model, so DistributedDataParallel does not know of it and averages nothing; "
            "every rank trains a model of its own.",
            fix=(f"call the wrapped model at {short(where)} instead of its .module",),
            evidence=(
                view.cite(
                    f"step {events[0].step + 1}: gradients without a forward through the wrapper, used at {short(view.site(events[0]['site']))}"
                ),
                *(view.cite(f"inner model called at {short(where)}") for _ in calls[:1]),
            ),
            certainty="certain" if calls else "likely",
            ranks=some,
            where=where,
            explains=("numbers/ranks-apart", *(("hang/*", "crash/*", "numbers/silent-pairing") if some else ())),
        )
        return

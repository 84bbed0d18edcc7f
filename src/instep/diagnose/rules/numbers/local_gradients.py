"""The optimizer uses gradients that were not averaged.

## What it sees
Optimizer steps whose last backward ran under `no_sync()`.

## Why it matters
Under `no_sync` gradients add up on the rank alone. The last micro-batch before the step has to run outside it, else its part (or all of it) is never averaged and the ranks drift apart.

## What to do
Leave `no_sync` for the last micro-batch of each group: `(i + 1) % accum`, not `i % accum`, and the last, shorter group as well.

## When it is wrong
Local SGD, which averages parameters instead; it is recognised by its collectives over parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.lines import line_with
from instep.diagnose.model_facts import averages_otherwise
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding

MIN_STEPS = 3


def check(run: RunView) -> Iterator[Finding]:
    if run.world_size < 2:
        return
    for view in run.ranks:
        events = [event for event in view.named("local-gradients") if not averages_otherwise(view, event["wrapper"])]
        if len(events) < MIN_STEPS:
            continue
        used = view.site(events[0]["site"])
        context = view.site(events[-1]["no_sync_site"])
        where = line_with(context or used, "no_sync", "no_backward_sync", "accumulate", "require_backward_grad_sync")
        where = where or used
        local, steps = events[0]["local"], view.num_steps
        yield Finding(
            id="numbers/local-gradients",
            title=f"{len(events)} of {steps} optimizer steps used gradients that were not averaged",
            cause=f"The {'last backward' if local == 1 else f'last {local} backwards'} before the step at {short(used)} ran under no_sync "
            f"({short(where)}), so that part of the gradient stays on its rank.",
            fix=(f"at {short(where)} leave no_sync for the last micro-batch before each step: `(i + 1) % accum`",),
            evidence=(
                view.cite(
                    f"step {events[0].step + 1}: {local} backwards under no_sync after the last average, then the step at {short(used)}"
                ),
            ),
            certainty="certain",
            where=where,
            explains=("numbers/ranks-apart",),
        )
        return

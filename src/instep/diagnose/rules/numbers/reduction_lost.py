"""A wrapped model no longer averages its gradients.

## What it sees
Optimizer steps after a forward through the wrapper and a backward, without a single average.

## Why it matters
DistributedDataParallel listens to the parameters it found when it was built. Parameters that were replaced or cast afterwards (`.double()`, `.float()`, new layers) are not among them.

## What to do
Change, cast and load the model before it is wrapped.

## When it is wrong
A backward that rightly reaches no parameter of the wrapped model.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.model_facts import averages_otherwise, wraps
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding

MIN_STEPS = 3


def check(run: RunView) -> Iterator[Finding]:
    if run.world_size < 2:
        return
    for view in run.ranks:
        events = [
            event for event in view.named("step-without-reduction") if not averages_otherwise(view, event["wrapper"])
        ]
        if len(events) < MIN_STEPS or len(events) < 0.5 * view.num_steps:
            continue
        event = events[0]
        wrap = wraps(view).get(event["wrapper"])
        made = view.site(wrap["site"]) if wrap else None
        kinds = ("module-changed", "load") if event["replaced"] else ("module-changed",)  # load_state_dict(assign=True)
        changed = [one for kind in kinds for one in view.named(kind) if one["wrapper"] == event["wrapper"]]
        where = view.site(changed[0]["site"]) if changed else made
        how = (
            f"cast to {event['cast']}"
            if event["cast"]
            else f"{event['replaced']} of them replaced"
            if event["replaced"]
            else "changed"
        )
        yield Finding(
            id="numbers/reduction-lost",
            title=f"gradients were not averaged in {len(events)} steps, though the wrapped model was called",
            cause=f"The parameters were {how} after the model was wrapped at {short(made)}, so DistributedDataParallel no longer hears of their gradients.",
            fix=("change, cast and load the model before it is wrapped",),
            evidence=(
                view.cite(
                    f"step {event.step + 1}: forward through the wrapper and backward, no average, step at {short(view.site(event['site']))}"
                ),
            ),
            certainty="certain" if event["cast"] or event["replaced"] else "likely",
            where=where,
            explains=("numbers/ranks-apart",),
        )
        return

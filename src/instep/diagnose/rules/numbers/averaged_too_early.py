"""Gradients are averaged before the last backward has added to them.

## What it sees
The script's own all-reduce of gradients, and a backward between it and the optimizer step, step after step.

## Why it matters
What the last backward adds is this rank's own. The step uses a mean over the ranks plus a part that differs on each, and the ranks drift
apart.

## What to do
Average after the last micro-batch's backward, right before the step.

## When it is wrong
A backward that rightly reaches other parameters; then the ranks stay equal, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.plain_facts import MIN_SHARE, plain_models
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    for model in plain_models(run):
        rows = [row for row in model.averaged if row["later_backwards"]]
        parted = [step for step in model.first_apart.values() if step > 0]
        if not rows or len(rows) < MIN_SHARE * len(model.averaged) or not parted:
            continue
        where = model.averaged_at
        yield Finding(
            id="numbers/averaged-too-early",
            title=f"gradients are averaged before the last backward of {len(rows)} steps, whose part stays on its rank",
            cause=f"The script averages at {short(where)}; after that {rows[0]['later_backwards']} more backward adds to the gradients before the step uses them.",
            fix=(f"move the average at {short(where)} behind the last backward, right before the step",),
            evidence=(
                model.view.cite(f"step {rows[0].step + 1}: averaged at {short(where)}, then a backward, then the step"),
                model.view.cite(f"the ranks' parameters differ after {min(parted)} steps"),
            ),
            certainty="certain",
            where=where,
            explains=("numbers/ranks-apart",),
        )
        return

"""The optimizer updates parameters that never get a gradient.

## What it sees
An optimizer whose parameters had no gradient in any of its steps, while a wrapped model got gradients.

## Why it matters
Nothing is learned: the model that computes the loss keeps its first weights. A usual cause is an optimizer that was made over a copy of the
model, or over parameters that were replaced afterwards.

## What to do
Make the optimizer from the parameters of the model that computes the loss, after everything that replaces them.

## When it is wrong
An optimizer that is to start working later; some steps with gradients are enough to keep this silent.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        rows = [row for row in view.named("empty-steps") if row["trained"]]
        if not rows:
            continue
        made = next((row for row in view.named("optimizer") if row["optimizer"] == rows[-1]["optimizer"]), None)
        where = view.site(made["site"]) if made is not None else None
        yield Finding(
            id="numbers/optimizer-of-others",
            title=f"the optimizer updates nothing: none of its parameters had a gradient in {rows[-1]['steps']} steps",
            cause=f"The optimizer made at {short(where)} has other parameters than the model that the loss is computed from (a copy, or ones that were replaced since).",
            fix=(f"at {short(where)} pass the parameters of the model that is trained",),
            evidence=(
                view.cite(f"{rows[-1]['steps']} steps without any gradient, while the wrapped model had gradients"),
            ),
            certainty="certain",
            where=where,
        )
        return

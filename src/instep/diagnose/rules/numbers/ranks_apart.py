"""The ranks' parameters have parted.

## What it sees
A few numbers made of each parameter of a wrapped model, compared between ranks by name every so often.

## Why it matters
Averaged gradients and equal updates keep the ranks equal to the last bit. Once they differ they stay apart, each rank trains another model, and rank 0's is saved.

## What to do
Look for what differs between ranks before the step that is named: what was loaded, which parameters there are, what was called.

## When it is wrong
Scripts whose parameters rightly differ between ranks and that average them unseen. Sharded, tensor-parallel and unwrapped models are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.model_facts import find_apart, wraps
from instep.diagnose.naming import short
from instep.diagnose.parameter_writes import find_write
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    apart = find_apart(run)
    if apart is None:
        return
    wrapper, step, name, gap = apart
    view = next(one for one in run.ranks if wrapper in wraps(one))
    made = view.site(wraps(view)[wrapper]["site"])
    written = find_write(made)
    yield Finding(
        id="numbers/ranks-apart",
        title=f"the ranks' parameters have parted: {name} differs by {gap:.1%} after step {step}",
        cause="Something between the last comparison and this step was not the same on all ranks."
        if written is None
        else f"{short(written)} writes to parameters beside the optimizer, most likely with values or in places that differ between ranks.",
        fix=(
            *(
                (
                    f"at {short(written)} write the same on all ranks: from all-reduced values and equal random numbers, or broadcast the result",
                )
                if written
                else ()
            ),
            "load, change and initialise the model on all ranks alike, before it is wrapped",
            "average every gradient that a step uses",
        ),
        evidence=(
            view.cite(f"step {step}: {name} of the model wrapped at {short(made)} differs between ranks by {gap:.1%}"),
        ),
        certainty="likely",
        where=written or made,
    )

"""The ranks average gradients, and start from different weights.

## What it sees
A model whose gradients the script averages itself in every step, and whose parameters differ between ranks before the first step and ever after.

## Why it matters
Equal gradients keep equal weights equal; they do not bring different ones together. Each rank trains another model, with gradients that
belong to none of them. DistributedDataParallel would send rank 0's weights to all when it is built; a script that averages by itself has to
do that too.

## What to do
Send the weights of one rank to all before the optimizer is made, `dist.broadcast(p.data, src=0)` for each parameter and buffer; or build the
model under the same seed on every rank, and set the seed of each rank afterwards.

## When it is wrong
Ensembles, whose members are meant to differ, have no reason to average gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.plain_facts import PlainModel, name_some, plain_models
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import assigned_to
from instep.diagnose.source import load
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    for model in plain_models(run):
        apart = [name for name, step in model.first_apart.items() if step == 0]
        if not model.averaged or len(apart) < 0.25 * len(model.optimizer["names"]):
            continue
        where = _made_at(model, apart[0]) or model.site
        yield Finding(
            id="numbers/different-start",
            title=f"the ranks start from different weights: {name_some(apart)}",
            cause=f"The model made at {short(where)} is initialised by each rank's own random numbers, and only its gradients are averaged (at {short(model.averaged_at)}).",
            fix=(
                f"broadcast rank 0's parameters and buffers after {short(where)}: dist.broadcast(p.data, src=0)",
                "or wrap the model in DistributedDataParallel, which does that",
            ),
            evidence=(
                model.view.cite(
                    f"before the first step: {len(apart)} of {len(model.optimizer['names'])} parameters differ between ranks"
                ),
                model.view.cite(
                    f"gradients averaged by the script in {len(model.averaged)} of the first {len(model.averages)} steps"
                ),
            ),
            certainty="certain",
            where=where,
            explains=("numbers/ranks-apart",),
        )
        return


def _made_at(model: PlainModel, name: str) -> CallSite | None:
    """Where the variable was assigned that holds the model."""
    source = load(model.site.file) if model.site is not None else None
    if source is None or model.site is None:
        return None
    found = assigned_to(source.function_at(model.site.line), name.partition(".")[0])
    return source.site(found[0]) if found else None

"""A checkpoint was loaded with `strict=False`, and most of its entries fit nothing.

## What it sees
`load_state_dict(strict=False)` that left most parameters as they were and most entries unused.

## Why it matters
The model goes on with its first random weights. A usual cause is the prefix `module.`, which a wrapped model puts before every name.

## What to do
Save `model.module.state_dict()`, or take the prefix off before loading; load with `strict=True`.

## When it is wrong
A deliberate load of a small part (a backbone), where few entries are unused.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.run_view import RunView, short
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        for event in view.named("load"):
            if event["strict"] or not event["own_keys"]:
                continue
            if event["num_missing"] < 0.9 * event["own_keys"] or event["num_unexpected"] < 0.9 * event["keys"]:
                continue
            where = view.site(event["site"])
            yield Finding(
                id="numbers/checkpoint-keys-ignored",
                title=f"a checkpoint was loaded, but {event['num_missing']} of {event['own_keys']} entries of the model got nothing from it",
                cause=f"The names do not fit: the file has {event['unexpected'][0]}, the model {event['missing'][0]}; strict=False at {short(where)} passes over that.",
                fix=(
                    "take the prefix off, or save model.module.state_dict()",
                    f"load with strict=True at {short(where)}",
                ),
                evidence=(
                    view.cite(
                        f"missing: {', '.join(event['missing'][:3])}; unused: {', '.join(event['unexpected'][:3])}"
                    ),
                ),
                certainty="certain",
                where=where,
            )
            return

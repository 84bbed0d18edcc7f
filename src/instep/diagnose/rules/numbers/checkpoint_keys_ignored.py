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

from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Finding

MIN_SHARE = 0.9  # of the model's entries without a value, and of the file's without a place
MIN_RENAMED = 0.5  # of the model's entries, when the names differ by a prefix alone


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        for event in view.named("load"):
            if not event["strict"] and event["own_keys"] and _misses(event):
                yield _finding(view, event)
                return


def _misses(event: Event) -> bool:
    missing = event["num_missing"] / event["own_keys"]
    unused = event["num_unexpected"] / event["keys"] if event["keys"] else 1.0
    return (missing >= MIN_SHARE and unused >= MIN_SHARE) or (missing >= MIN_RENAMED and prefix_of(event) is not None)


def prefix_of(event: Event) -> str | None:
    """What the names of the file have before those of the model, or the other way round."""
    for unused in event["unexpected"]:
        for missing in event["missing"]:
            longer, shorter = max(unused, missing, key=len), min(unused, missing, key=len)
            if longer.endswith(f".{shorter}"):
                return longer.removesuffix(shorter)
    return None


def _finding(view: RankView, event: Event) -> Finding:
    where, prefix = view.site(event["site"]), prefix_of(event)
    names = (
        f"The names do not fit: the file has {event['unexpected'][0]}, the model {event['missing'][0]}"
        if event["unexpected"]
        else "Nothing of the file was handed over: its names had been filtered by those of the model"
    )
    return Finding(
        id="numbers/checkpoint-keys-ignored",
        title=f"a checkpoint was loaded, but {event['num_missing']} of {event['own_keys']} entries of the model got nothing from it",
        cause=f"{names}; strict=False at {short(where)} passes over that.",
        fix=(
            f"take the prefix {prefix!r} off, or save model.module.state_dict()"
            if prefix
            else "save and load by the same names: model.module.state_dict()",
            f"load with strict=True at {short(where)}",
        ),
        evidence=(
            view.cite(
                f"missing: {', '.join(event['missing'][:3])}; unused: {', '.join(event['unexpected'][:3]) or 'nothing'}"
            ),
        ),
        certainty="certain" if event["unexpected"] else "likely",
        where=where,
    )

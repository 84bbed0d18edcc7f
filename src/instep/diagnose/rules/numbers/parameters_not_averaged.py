"""Some parameters are trained, and their gradients are never averaged.

## What it sees
Parameters of an optimizer that are in no wrapped model, and whose gradients no collective of the script joined, while those of others are
averaged. The ranks had equal values of them at the start, and have different ones later.

## Why it matters
Each rank learns its own values of these parameters from its own part of the data. The model of rank 0, which is saved, fits no other rank's.

## What to do
Put all that is trained into the model before it is wrapped, or average every gradient that the optimizer uses.

## When it is wrong
Parameters that are meant to be different on each rank, as experts are; they mostly start from different values.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.plain_facts import PlainModel, name_some, plain_models
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    for model in plain_models(run):
        names = _left_out(model)
        parted = [name for name in names if model.first_apart.get(name, 0) > 0]
        if parted:
            yield _finding(run, model, parted)
            return


def _left_out(model: PlainModel) -> list[str]:
    """Those that had gradients and were never averaged, while others were: by a wrapper, or by the script."""
    if not model.averages or (model.optimizer["alone"] and not model.averaged):
        return []
    always: list[set[str]] = [set(row["missed"]) for row in model.averages if row["of"]]
    missed = always[0].intersection(*always) if always else set[str]()
    return [name for name in model.optimizer["names"] if name in missed]


def _finding(run: RunView, model: PlainModel, names: list[str]) -> Finding:
    view, by_hand = model.view, model.averaged_at
    put_in = _replaced_at(model, names)
    where = put_in or by_hand or model.site
    if by_hand is not None:
        cause = f"The script averages gradients at {short(by_hand)} and leaves these out."
        fix = f"average every gradient that the optimizer uses at {short(by_hand)}"
    elif put_in is not None:
        cause = f"{short(put_in)} puts them into the model after it was wrapped, and DistributedDataParallel averages what it found when it was built."
        fix = f"do what {short(put_in)} does before the model is wrapped"
    else:
        cause = f"The optimizer made at {short(model.site)} trains them, and they are in no model that is wrapped."
        fix = "wrap what holds them as well, or one module that holds all that is trained"
    step = min(model.first_apart[name] for name in names)
    return Finding(
        id="numbers/parameters-not-averaged",
        title=f"the gradients of {len(names)} parameters are never averaged: {name_some(names)}",
        cause=f"{cause} Every rank trains its own values of them.",
        fix=(fix,),
        evidence=(
            view.cite(
                f"{len(model.averages)} steps: gradients of {name_some(names)} used as the rank had computed them"
            ),
            view.cite(f"equal on all ranks at the start, different after {step} step{'s' if step != 1 else ''}"),
        ),
        certainty="certain",
        where=where,
        explains=("numbers/ranks-apart",),
    )


def _replaced_at(model: PlainModel, names: list[str]) -> CallSite | None:
    """Where the script assigns the part of a wrapped model that the parameters are in."""
    source = load(model.site.file) if model.site is not None else None
    parts = {part for name in names if ".module." in name for part in name.split(".module.")[1].split(".")}
    for node in ast.walk(source.tree) if source is not None else ():
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in parts and ".module" in ast.unparse(target.value):
                return source.site(node) if source is not None else None
    return None

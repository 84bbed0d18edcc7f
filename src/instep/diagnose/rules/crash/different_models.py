"""The ranks wrapped models that are not the same.

## What it sees
The names and shapes of the parameters that each rank gave to DistributedDataParallel, and its error about them.

## Why it matters
Gradients are averaged parameter by parameter, so that every rank needs the same parameters in the same order.

## What to do
Make the model of what all ranks share: a number of classes or of tokens that is counted in a rank's own part of the data differs between
the ranks. Count it in the whole set, or on rank 0, and broadcast it.

## When it is wrong
Hardly: the ranks compared their models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Evidence, Finding

_DIFFER = re.compile(r"appears not to match (sizes|strides)|expects same model across all ranks", re.IGNORECASE)


def check(run: RunView) -> Iterator[Finding]:
    hit = [view for view in run.ranks if view.error is not None and _DIFFER.search(view.error["message"])]
    models = {view.rank: list(wraps(view).values())[-1] for view in run.ranks if wraps(view)}
    first = next(iter(models), None)
    if not hit or first is None:
        return
    others = [rank for rank in models if _shapes(models[rank]) != _shapes(models[first])]
    if not others:
        return
    model = models[others[0]]
    where = run.by_rank[others[0]].site(model["site"])
    yield Finding(
        id="crash/different-models",
        title=f"the ranks wrap different models: {_difference(models[first], model, first, others[0])}",
        cause=f"DistributedDataParallel at {short(where)} needs the same parameters on every rank. What the model is made of differs "
        "between them, as a number of classes that each rank counts in its own part of the data.",
        fix=("make the model of values that all ranks share: count in the whole set, or on rank 0 and broadcast it",),
        evidence=tuple(_cite(run.by_rank[rank], models[rank]) for rank in (first, *others[:3])),
        certainty="certain",
        ranks=tuple(others) if 2 * len(others) < len(models) else (),
        where=where,
        explains=("crash/*", "hang/*"),
    )


def _shapes(model: Event) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(shape)) for name, shape in zip(model["names"], model["shapes"])]


def _difference(one: Event, two: Event, rank: int, other: int) -> str:
    for (name, shape), (name_two, shape_two) in zip(_shapes(one), _shapes(two)):
        if name != name_two:
            return f"parameter {name} on rank {rank} is {name_two} on rank {other}"
        if shape != shape_two:
            return f"{name} has shape {list(shape)} on rank {rank} and {list(shape_two)} on rank {other}"
    return f"{one['num_parameters']} parameters on rank {rank}, {two['num_parameters']} on rank {other}"


def _cite(view: RankView, model: Event) -> Evidence:
    return view.cite(f"rank {view.rank}: {model['module']} with {model['num_parameters']} parameters")

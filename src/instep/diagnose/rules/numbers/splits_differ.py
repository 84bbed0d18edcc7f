"""The ranks cut the data set into different parts before they share it.

## What it sees
A DistributedSampler over a `Subset` (as `random_split` makes) whose indices differ between ranks, over a data set that lists the same
samples in another order on each rank (a shuffle, a listing of files), or samplers with different seeds.

## Why it matters
The sampler shares out positions, and expects that all ranks mean the same samples and the same order by them. Otherwise some samples
are seen several times, others never, and what one rank keeps for validation another one trains on.

## What to do
Give `random_split` a generator with the same seed on every rank, and every sampler the same `seed=`.

## When it is wrong
A cross-validation that gives every rank its own fold on purpose; it has no need of a DistributedSampler.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.data_facts import Key, loaders_by_key
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import call_at, definitions
from instep.diagnose.source import Source, load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding

_WORDS = {
    "subset": "the data set is split differently on each rank",
    "order": "the data set lists its samples in another order on each rank",
    "samples": "the data set holds other samples on each rank",
    "seed": "the ranks' samplers have different seeds",
}
_KEYS = {"samples": "order"}  # where a fact stands in the event
_SPLITS = (
    "random_split",
    "Subset",
    "train_test_split",
    "shuffle",
    "sample",
    "randperm",
    "permutation",
    "listdir",
    "glob",
    "rglob",
)


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2:
        return
    tables = [loaders_by_key(view) for view in run.ranks]
    for key in tables[0]:
        rows = [table[key] for table in tables if key in table]
        shared = len(rows) == len(tables) and all(row.get("replicas") == run.world_size for row in rows)
        if not shared:
            continue
        if len({row["subset"] for row in rows}) > 1:
            yield _finding(run, rows, find_split(key) or run.ranks[0].site(rows[0]["site"]), "subset")
        elif _reordered(rows):
            yield _finding(run, rows, find_split(key) or run.ranks[0].site(rows[0]["site"]), "order")
        elif _others(rows):
            yield _finding(run, rows, find_split(key) or run.ranks[0].site(rows[0]["site"]), "samples")
        elif rows[0].get("shuffles") and len({row["seed"] for row in rows}) > 1:
            yield _finding(run, rows, run.ranks[0].site(rows[0]["sampler_site"]), "seed")


def _reordered(rows: list[Event]) -> bool:
    """The same samples on all ranks, listed in different orders."""
    orders = [row.get("order") for row in rows]
    known = [order for order in orders if order is not None]
    return (
        len(known) == len(rows) and len({order[1] for order in known}) == 1 and len({order[0] for order in known}) > 1
    )


def _others(rows: list[Event]) -> bool:
    """Data sets of one length on all ranks that list different samples."""
    orders = [row.get("order") for row in rows]
    known = [order for order in orders if order is not None and order[2:] == [1]]
    same_length = len({row["length"] for row in rows}) == 1
    return len(known) == len(rows) and len({order[1] for order in known}) > 1 and same_length


def _finding(run: RunView, rows: list[Event], where: CallSite | None, what: str) -> Finding:
    word = _WORDS[what]
    return Finding(
        id="numbers/splits-differ",
        title=word,
        cause=f"What is drawn at {short(where)} differs between ranks, and the DistributedSampler shares out positions as if it did not: "
        "some samples are used several times, others never.",
        fix=(f"use the same seed on every rank at {short(where)}, as generator=torch.Generator().manual_seed(0)",)
        if what != "seed"
        else (f"pass the same seed= on every rank at {short(where)}",),
        evidence=tuple(
            view.cite(f"rank {view.rank}: {what} {row[_KEYS.get(what, what)]}, {row['length']} samples")
            for view, row in zip(run.ranks[:4], rows)
        ),
        certainty="certain",
        where=where,
    )


def find_split(key: Key) -> CallSite | None:
    """The call that splits, followed back from what the loader is made of."""
    source = load(key[0])
    call = call_at(source, key[1], "DataLoader") if source else None
    if source is None or call is None or not call.args:
        return None
    for node in definitions(source, call.args[0], source.function_at(key[1])):
        for part in ast.walk(node):
            if isinstance(part, ast.Call):
                name = getattr(part.func, "attr", getattr(part.func, "id", ""))
                inside = part if name in _SPLITS else _split_in_class(source, name)
                if inside is not None:
                    return source.site(inside)
    return None


def _split_in_class(source: Source, name: str) -> ast.Call | None:
    """Where a data set class of the script shuffles or lists its samples."""
    found = next((node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef) and node.name == name), None)
    calls = (node for node in ast.walk(found) if isinstance(node, ast.Call)) if found is not None else ()
    return next((node for node in calls if getattr(node.func, "attr", getattr(node.func, "id", "")) in _SPLITS), None)

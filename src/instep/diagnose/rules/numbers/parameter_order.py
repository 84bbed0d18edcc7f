"""The ranks have the same parameters in a different order.

## What it sees
Names of the wrapped model's parameters on each rank, in order; or a constructor that goes over a set of names while all ranks happen to share one hash seed.

## Why it matters
DistributedDataParallel pairs parameters by position. When the order comes from a set of strings, it differs between processes (Python's hash seed), and each parameter is averaged with another one.

## What to do
Sort the names: `for name in sorted(set(names))`.

## When it is wrong
Hardly for different names; a set whose order does not decide about parameters is not named.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.model_facts import same_group, wraps
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.source import Source, load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding


def check(run: RunView) -> Iterator[Finding]:
    for wrapper, event in wraps(run.ranks[0]).items() if run.ranks else ():
        members = same_group(run, wrapper)
        rows = {view.rank: wraps(view)[wrapper] for view in members}
        differs = len({tuple(row["names"]) for row in rows.values()}) > 1
        where, source_of = find_unordered(event)
        if differs and len({tuple(sorted(row["names"])) for row in rows.values()}) == 1:
            yield _differs(run, rows, where or run.ranks[0].site(event["site"]), source_of)
            return
        if not differs and where is not None and source_of == "a set" and len(rows) > 1:
            yield _by_chance(run, event, where)
            return


def _differs(run: RunView, rows: dict[int, Event], where: CallSite | None, source_of: str) -> Finding:
    first = rows[min(rows)]
    rank = next(rank for rank, row in rows.items() if row["names"] != first["names"])
    place = next(i for i, (one, two) in enumerate(zip(first["names"], rows[rank]["names"])) if one != two)
    return Finding(
        id="numbers/parameter-order",
        title=f"parameter {place} is {first['names'][place]} on rank {min(rows)} and {rows[rank]['names'][place]} on rank {rank}",
        cause=f"The order of the parameters comes from {source_of or 'something that differs between processes'} at {short(where)}; "
        "gradients are averaged by position, so different parameters are mixed.",
        fix=(f"sort at {short(where)}: sorted(...)",),
        evidence=tuple(
            run.by_rank[one].cite(f"order of parameters on rank {one}: {', '.join(row['names'][:6])}")
            for one, row in list(rows.items())[:3]
        ),
        certainty="certain",
        where=where,
        explains=("numbers/ranks-apart",),
    )


def _by_chance(run: RunView, event: Event, where: CallSite) -> Finding:
    view = run.ranks[0]
    return Finding(
        id="numbers/parameter-order",
        title="the order of the parameters comes from a set, and is equal on all ranks only because they share a hash seed",
        cause=f"The model is built by going over a set at {short(where)}. Ranks that start as processes of their own (torchrun, several nodes) "
        "have different orders, and gradients are averaged by position.",
        fix=(f"sort at {short(where)}: sorted(...)",),
        evidence=(view.cite(f"order of parameters here: {', '.join(event['names'][:6])}"),),
        certainty="likely",
        where=where,
    )


def find_unordered(event: Event) -> tuple[CallSite | None, str]:
    """Where a constructor of the model goes over something without an order while it makes parts of the model."""
    for row in event["classes"]:
        source = load(row["file"])
        for node in ast.walk(source.tree) if source else ():
            if row["line"] <= getattr(node, "lineno", 0) <= row["last"] and isinstance(
                node, (ast.For, ast.comprehension)
            ):
                found = _unordered(source, node.iter)  # type: ignore[arg-type]
                if found and _makes_modules(source, node):  # type: ignore[arg-type]
                    return source.site(node.iter), found  # type: ignore[union-attr]
        # A comprehension has no line of its own; its iterable has.
        for node in ast.walk(source.tree) if source else ():
            if isinstance(node, ast.comprehension) and row["line"] <= node.iter.lineno <= row["last"]:
                found = _unordered(source, node.iter)  # type: ignore[arg-type]
                if found and _makes_modules(source, node):  # type: ignore[arg-type]
                    return source.site(node.iter), found  # type: ignore[union-attr]
    return None, ""


def _unordered(source: Source, iterated: ast.expr) -> str:
    """What kind of thing without an order is gone over; a name is followed one assignment back."""
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
        if iterated.func.id in ("sorted",):
            return ""
        if iterated.func.id in ("set", "frozenset"):
            return "a set"
        if iterated.func.id in ("enumerate", "list", "tuple", "reversed") and iterated.args:
            return _unordered(source, iterated.args[0])
    if isinstance(iterated, (ast.Set, ast.SetComp)):
        return "a set"
    if isinstance(iterated, ast.BinOp) and isinstance(iterated.op, (ast.BitOr, ast.BitAnd, ast.Sub)):
        return _unordered(source, iterated.left) or _unordered(source, iterated.right)
    if isinstance(iterated, ast.Call) and getattr(iterated.func, "attr", "") in (
        "listdir",
        "glob",
        "iterdir",
        "scandir",
    ):
        return "a listing of files"
    if isinstance(iterated, (ast.Name, ast.Attribute)):
        name = iterated.id if isinstance(iterated, ast.Name) else iterated.attr
        values = [node.value for node in ast.walk(source.tree) if isinstance(node, ast.Assign) and _assigns(node, name)]
        return next(
            (
                found
                for value in values
                if not isinstance(value, (ast.Name, ast.Attribute)) and (found := _unordered(source, value))
            ),
            "",
        )
    return ""


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(getattr(target, "id", getattr(target, "attr", None)) == name for target in node.targets)


def _makes_modules(source: Source, node: ast.AST) -> bool:
    """Whether parts of a model are made in the loop: a call of something with a capital letter, or add_module."""
    around = source.parents.get(node, node) if isinstance(node, ast.comprehension) else node
    for part in ast.walk(around):
        if isinstance(part, ast.Call):
            name = getattr(part.func, "attr", getattr(part.func, "id", ""))
            if name[:1].isupper() or name in ("add_module", "register_module", "register_parameter"):
                return True
    return False

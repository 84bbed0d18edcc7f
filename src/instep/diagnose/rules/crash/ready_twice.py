"""A parameter got its gradient twice in one backward, and DistributedDataParallel had already sent the first.

## What it sees
The error "Expected to mark a variable ready only once", the name behind the index in it, and how the model was wrapped.

## Why it matters
DistributedDataParallel averages a gradient as soon as it is there. Reentrant checkpointing runs a backward of its own for each
block, so that a block which is used twice hands in its gradients twice; parameters used outside of `forward` do so too.

## What to do
Call `checkpoint(..., use_reentrant=False)`; or wrap with `static_graph=True`; leave out `find_unused_parameters=True` where every
parameter is used.

## When it is wrong
When the parameter is shared in another way than by checkpointing: the name in the title tells which.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite, Finding

_TWICE = re.compile(r"mark a variable ready only once", re.IGNORECASE)
_INDEX = re.compile(r"Parameter at index (\d+)(?: with name (\S+))?")


def check(run: RunView) -> Iterator[Finding]:
    hit = [view for view in run.ranks if view.error is not None and _TWICE.search(view.error["message"])]
    if not hit:
        return
    view = hit[0]
    models = list(wraps(view).values())
    made = view.site(models[-1]["site"]) if models else None
    called = next((site for model in models for site in find_reentrant(model)), None)
    frames = view.main_frames
    yield Finding(
        id="crash/ready-twice",
        title=f"{_name(view, models)} got its gradient twice in one backward",
        cause=f"DistributedDataParallel, built at {short(made)}, had already handed the first one over to be averaged."
        + (f" What is checkpointed at {short(called)} is used more than once." if called else ""),
        fix=_what_to_do(called, made, any(model["find_unused"] for model in models)),
        evidence=(view.cite(" ".join((view.error or {})["message"].split())[:120], "failure.json"),),
        certainty="certain",
        ranks=tuple(one.rank for one in hit) if len(hit) < run.world_size else (),
        where=called or made or (frames[0].site if frames else None),
        explains=("crash/*", "hang/*"),
    )


def _what_to_do(called: CallSite | None, made: CallSite | None, searches: bool) -> tuple[str, ...]:
    least = f"leave out find_unused_parameters=True at {short(made)}, if every parameter is used"
    return (
        f"pass use_reentrant=False to checkpoint{f' at {short(called)}' if called else ''}",
        f"or pass static_graph=True at {short(made)}, if every step uses the same parameters",
        *((least,) if searches else ()),
    )


def _name(view: RankView, models: list[Event]) -> str:
    found = _INDEX.search((view.error or {"message": ""})["message"])
    if found is None:
        return "a parameter"
    index, name = int(found.group(1)), (found.group(2) or "").rstrip(".")
    known = [model["names"][index] for model in models if index < len(model["names"])]
    return name if name and name != "has" else (known[0] if len(known) == 1 else f"parameter {index}")


def find_reentrant(model: Event) -> Iterator[CallSite]:
    """Calls of `checkpoint` in the model's classes that are not told to be without reentrance."""
    for row in model["classes"]:
        source = load(row["file"])
        for node in ast.walk(source.tree) if source else ():
            if not isinstance(node, ast.Call) or not row["line"] <= node.lineno <= row["last"]:
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            if name in ("checkpoint", "checkpoint_sequential") and words.get("use_reentrant") is not False:
                yield source.site(node)  # type: ignore[union-attr]

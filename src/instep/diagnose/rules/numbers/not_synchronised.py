"""Nothing is averaged: every rank trains a model of its own.

## What it sees
A data set shared out by a DistributedSampler, optimizer steps on all ranks, no wrapped model, and not a single collective in between.

## Why it matters
Each rank learns from its part of the data only, and rank 0's model is kept.

## What to do
Wrap the model: `model = DistributedDataParallel(model)`, or average the gradients before each step.

## When it is wrong
Ranks that are meant to train models of their own, or that meet by means that torch.distributed does not see.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.data_facts import loaders_by_key
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import assigned_to
from instep.diagnose.source import load
from instep.records.finding import CallSite, Finding

MIN_STEPS = 20
AVERAGE_UNSEEN = {"instep.train.run", "deepspeed", "horovod"}  # by shared memory or collectives of their own


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or run.world_size < 2 or not all(_trains_alone(view, run.world_size) for view in run.ranks):
        return
    view = run.ranks[0]
    last = view.page.newest_step_mark if view.page else None
    step = view.site(last.site) if last else None
    where = _model_line(step) or step
    yield Finding(
        id="numbers/not-synchronised",
        title=f"nothing was averaged in {view.num_steps} steps: every rank trains a model of its own",
        cause=f"The data are shared out over the ranks, but the model made at {short(where)} is not wrapped, and no collective ran between the steps.",
        fix=(f"wrap the model made at {short(where)} in DistributedDataParallel",),
        evidence=tuple(
            one.cite(f"rank {one.rank}: {one.num_steps} steps, no collective between them", "page.bin")
            for one in run.ranks[:4]
        ),
        certainty="likely",
        where=where,
    )


def _trains_alone(view: RankView, world_size: int) -> bool:
    page = view.page
    libraries = view.last("libraries")
    if libraries is not None and set(libraries["names"]) & AVERAGE_UNSEEN:
        return False
    if page is None or page.num_steps < MIN_STEPS or view.named("wrap") or view.named("point-to-point"):
        return False
    shared = any(row.get("replicas") == world_size and row.get("shuffles") for row in loaders_by_key(view).values())
    marks = [mark for mark in page.step_marks() if mark.step > 1]
    return shared and len(marks) > 1 and (marks[0].sequence, marks[0].calls) == (marks[-1].sequence, marks[-1].calls)


def _model_line(step: CallSite | None) -> CallSite | None:
    """Where the model was made whose parameters an optimizer got."""
    source = load(step.file) if step else None
    for node in ast.walk(source.tree) if source else ():
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "parameters"
            and isinstance(node.func, ast.Attribute)
        ):
            name = getattr(node.func.value, "id", "")
            for value in assigned_to(source.function_at(node.lineno), name):  # type: ignore[union-attr]
                return source.site(value)  # type: ignore[union-attr]
    return None

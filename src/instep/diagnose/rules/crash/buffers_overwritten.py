"""A second forward overwrote the buffers that the backward of the first one needs.

## What it sees
The error "modified by an inplace operation", and two forwards of one wrapped model that has buffers, with no backward between.

## Why it matters
Before each forward DistributedDataParallel copies rank 0's buffers (as the running averages of batch norm) over those of all ranks.
What the first forward has kept of them is no longer what it was, and its backward refuses. In one process nothing is copied, and the
same script runs.

## What to do
Call the model once on both inputs joined (`torch.cat`), or do the backward of the first before the second forward; or wrap with
`broadcast_buffers=False`; batch norm needs no copying at all as SyncBatchNorm.

## When it is wrong
When the script itself changes a tensor in place between forward and backward: look at what the error names.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records import recording as layout
from instep.records.finding import Finding
from instep.records.recording import Mark


def check(run: RunView) -> Iterator[Finding]:
    hit = [(view, found) for view in run.ranks if (found := find_second(view)) is not None]
    if not hit:
        return
    view, (first, second) = hit[0]
    before, where = short(view.site(first.site)), view.site(second.site)
    made = short(view.site(wraps(view)[second.count]["site"]))
    yield Finding(
        id="crash/buffers-overwritten",
        title=f"the forward at {short(where)} overwrote buffers that the backward of the forward at {before} needs",
        cause=f"Before each forward DistributedDataParallel, built at {made}, copies rank 0's buffers over all ranks' own, as long "
        "as broadcast_buffers is not off.",
        fix=(
            f"pass broadcast_buffers=False at {made}",
            "or call the model once, on both inputs joined with torch.cat",
            "or convert batch norm with torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        ),
        evidence=(
            view.cite(f"two forwards before the backward: {before} and {short(where)}", "page.bin"),
            view.cite(" ".join((view.error or {})["message"].split())[:160], "failure.json"),
        ),
        certainty="certain",
        ranks=tuple(one.rank for one, _ in hit) if len(hit) < run.world_size else (),
        where=where,
        explains=("crash/*", "hang/*"),
    )


def find_second(view: RankView) -> tuple[Mark, Mark] | None:
    """The last two forwards of one model before the backward that failed."""
    if view.error is None or "modified by an inplace operation" not in view.error["message"]:
        return None
    forwards: list[Mark] = []
    for mark in reversed(view.marks):
        if mark.kind == "leave-step" and forwards:
            break
        if mark.kind == "enter-forward" and not mark.flags & layout.NO_GRAD:
            forwards.append(mark)
    models = wraps(view)
    for second in forwards:
        model = models.get(second.count)
        copies = model is not None and model.get("buffers", 0) and model["broadcast_buffers"] is not False
        first = next((mark for mark in forwards if mark.when < second.when and mark.count == second.count), None)
        if copies and first is not None:
            return first, second
    return None

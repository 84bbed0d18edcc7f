"""The communication backend does not come to its end.

## What it sees
Every rank that is left is in `destroy_process_group`, and makes no progress.

## Why it matters
The work is done, but the process stays. torch 2.13 waits for gloo's threads while it holds Python's interpreter lock, and one of
them may be waiting for that lock (it gives up the work of the last backward).

## What to do
Nothing is lost: what was saved is saved. `time.sleep(0.1)` before `dist.destroy_process_group()` makes it very unlikely; instep
waits a little there itself.

## When it is wrong
A very slow network, where the end of a group is a collective of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "backend-does-not-end":
        return
    ranks = tuple(one.rank for one in hang.waiting)
    where = hang.waiting[0].site
    yield Finding(
        id="hang/backend-does-not-end",
        title=f"{name_ranks(ranks)} did not come out of destroy_process_group",
        cause="The backend waits for its own threads, which wait for the interpreter lock; all work had been done before.",
        fix=(f"put time.sleep(0.1) before {short(where)}",),
        evidence=cite_positions(run, hang.waiting),
        certainty="likely",
        ranks=ranks,
        where=where,
    )

"""Ranks have come to the end of their program, but their processes do not end.

## What it sees
The last lines of the program are done and the interpreter winds up, for as long as `--stall-after` says, without using a processor.

## Why it matters
The run never ends, and its machines stay taken. Threads of the communication backend that are still there when the interpreter
goes can do this: PyTorch 2.13 with gloo hangs so when the process group is not destroyed and the ranks leave at different steps.

## What to do
Call `dist.destroy_process_group()` as the last thing on every rank, also on the way out after an error.

## When it is wrong
Work at the exit that takes long, as sending logs to a server.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.naming import name_ranks
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "process-does-not-end":
        return
    ranks = tuple(one.rank for one in hang.outside)
    verb = "has" if len(ranks) == 1 else "have"
    errors = [view for view in run.ranks if view.rank in ranks and view.error is not None]
    yield Finding(
        id="hang/process-does-not-end",
        title=f"{name_ranks(ranks)} {verb} come to the end of the program, but the process does not end",
        cause="Something that is wound up at the end waits, most likely threads of the communication backend: they are "
        "there until the process group is destroyed.",
        fix=("call dist.destroy_process_group() last on every rank, also after an error",),
        evidence=(
            *cite_positions(run, hang.outside),
            *(view.cite(f"rank {view.rank}: {(view.error or {}).get('message', '')[:120]}") for view in errors[:4]),
        ),
        certainty="possible",
        ranks=ranks,
    )

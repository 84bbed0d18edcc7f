"""Ranks entered the same collective with tensors of different sizes or types.

## What it sees
The number and the type of the elements that each rank passed to the same call.

## Why it matters
gloo ends the process with SIGABRT and no traceback, or lets one rank go on with part of the data.

## What to do
Pass tensors of one size and one dtype: pad to the largest (all-reduce the sizes first), or gather objects instead.

## When it is wrong
Hardly: these collectives need equal sizes and types.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.pairing import find_mispairing
from instep.diagnose.rules.hang.different_sizes import describe_sizes
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    mispairing = find_mispairing(run)
    if run.stall is None and mispairing is not None and mispairing.sizes_differ:
        yield describe_sizes("crash/different-sizes", run, mispairing)

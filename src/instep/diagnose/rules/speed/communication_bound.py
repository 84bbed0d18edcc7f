"""Most of the time goes into averaging gradients that nothing hides.

## What it sees
The share of the time that passes in backward without the rank's own work, on the rank that waits least, which no slower rank explains.

## Why it matters
More ranks then send more and gain little. What could be hidden behind the backward is not: the backward is over before the data have
gone.

## What to do
Do more work per average: a larger batch per rank, or several micro-batches under `no_sync()`. Send less: fp16 gradients
(`fp16_compress_hook`) halve the bytes, PowerSGD sends a fraction. Smaller buckets (`bucket_cap_mb=2`) start to send earlier.

## When it is wrong
On a machine with fewer cores than ranks, where waiting and working cannot be told apart well.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.diagnose.time_shares import measure_shares
from instep.records.finding import Finding
from instep.units import format_bytes

MIN_SHARE = 0.5  # exposed, of the time of a step
MIN_SECONDS = 2.0  # exposed in all: less is not worth a word
MIN_BYTES = 4 << 20  # of gradients per average: below, it is the latency of a small message


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, shares) for view in run.ranks if (shares := measure_shares(view)) is not None]
    if not run.is_whole or len(found) < len(run.ranks) or len(found) < 2:
        return
    view, shares = min(found, key=lambda row: row[1].communication)
    models = wraps(view)
    if (
        len(models) != 1
        or shares.communication < MIN_SHARE
        or shares.communication * shares.total_seconds < MIN_SECONDS
    ):
        return
    event = next(iter(models.values()))
    if event["bytes"] < MIN_BYTES:
        return
    backward = next((mark for mark in reversed(view.marks) if mark.kind == "leave-backward"), None)
    where = view.site(backward.site) if backward is not None else view.site(event["site"])
    step = shares.total_seconds / shares.steps
    doubled = 2 / (2 - shares.communication)
    yield Finding(
        id="speed/communication-bound",
        title=f"{shares.communication:.0%} of the time goes into averaging {format_bytes(event['bytes'])} of gradients, unhidden",
        cause=f"A step takes {step * 1e3:.0f} ms, of which {shares.communication * step * 1e3:.0f} ms pass in the backward at {short(where)} without work of its own, on every rank.",
        fix=(
            f"average half as often: a batch per rank twice as large, or two micro-batches of which one is under no_sync() (about {doubled:.1f} times as many samples per second)",
            f"send half the bytes: model.register_comm_hook(None, default_hooks.fp16_compress_hook) (up to {1 / (1 - shares.communication / 2):.1f} times as fast)",
        ),
        evidence=tuple(
            one.cite(
                f"rank {one.rank}: {row.communication:.0%} of {row.total_seconds:.1f} s exposed in backward", "page.bin"
            )
            for one, row in found[:4]
        ),
        certainty="likely",
        where=where,
    )

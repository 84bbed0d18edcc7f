"""Gradients are clipped while they are multiplied by the loss scale.

## What it sees
`clip_grad_norm_` between `scaler.scale(loss).backward()` and `scaler.step`, without `scaler.unscale_` before it.

## Why it matters
The norm that is compared with the limit is larger by the loss scale (65536 at first), so every gradient is cut to almost nothing after unscaling.

## What to do
Call `scaler.unscale_(optimizer)` before clipping.

## When it is wrong
A limit that was multiplied by the scale on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        events = view.named("clip-scaled")
        if not events:
            continue
        where, scaled = view.site(events[0]["site"]), view.site(events[0]["scale_site"])
        yield Finding(
            id="numbers/clip-before-unscale",
            title=f"gradients are clipped while they are multiplied by the loss scale, {len(events)} times",
            cause=f"{events[0]['call']} at {short(where)} sees gradients of the loss that {short(scaled)} has scaled; unscale_ was not called in between.",
            fix=(f"call scaler.unscale_(optimizer) before {short(where)}",),
            evidence=(view.cite(f"step {events[0].step + 1}: scaled at {short(scaled)}, clipped at {short(where)}"),),
            certainty="certain",
            where=where,
        )
        return

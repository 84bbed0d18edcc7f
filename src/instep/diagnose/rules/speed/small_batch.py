"""A step costs the same for more samples.

## What it sees
Few samples per rank and step, and the part of a step that does not depend on them: the average of few gradients, which is the latency of
a message and not its bytes; and the rank's own time, where steps with different numbers of samples (the last batch of an epoch) took
as long. On a GPU: a host that never has to wait for the device, so that launching operations is all the time there is.

## Why it matters
Python, the launch of each operation and the latency of each message cost the same for one sample as for a hundred. With few samples per
step they are most of the time, and more ranks make it worse.

## What to do
More samples per rank and step, with the learning rate that fits them. Where the batch must stay small: fewer ranks, fewer and larger
operations (`torch.compile`, CUDA graphs, fused optimizers).

## When it is wrong
When more samples do not fit into memory, or when the batch is small for the sake of what is learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from instep.diagnose.host_waits import measure_waits
from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.speed import communication_bound
from instep.diagnose.run_view import RunView
from instep.diagnose.time_shares import measure_shares
from instep.records.finding import CallSite, Evidence, Finding
from instep.units import format_bytes

MAX_ROWS, MAX_ROWS_ON_DEVICE = 16, 64  # samples per rank and step: with more, other things are worth changing first
MIN_FIXED = 0.7  # of a step
MIN_SECONDS = 5.0  # of fixed cost in all: less is not worth a word
MIN_STEPS_OF_A_SIZE = 5
MIN_SIZE_RATIO = 1.5  # between the numbers of samples that are compared
MAX_DELAYED = 0.1  # of the time, without a core
MAX_WAITED, MAX_DATA = (
    0.05,
    0.3,
)  # of a step: it is not for want of batches; and a device has long been done when it is asked


@dataclass(frozen=True)
class FixedCost:
    """share: of a step, what does not depend on the samples; facts: how that is known."""

    rows: int
    share: float
    step_seconds: float
    total_seconds: float
    facts: tuple[str, ...]
    is_on_device: bool = False

    def gain(self, times: int) -> float:
        """Samples per second with so many times as many samples per step, over now."""
        return times / (self.share + times * (1 - self.share))


def check(run: RunView) -> Iterator[Finding]:
    costs = [(view, cost) for view in run.ranks if (cost := _on_device(view) or _on_host(run, view)) is not None]
    if not costs or len(costs) < len(run.ranks):
        return
    view, cost = min(costs, key=lambda row: row[1].share)
    if cost.share < MIN_FIXED or cost.share * cost.total_seconds < MIN_SECONDS:
        return
    where = _loader_site(view)
    at = f" at {short(where)}" if where is not None else ""
    samples = "sample" if cost.rows == 1 else "samples"
    yield Finding(
        id="speed/small-batch",
        title=f"{cost.share:.0%} of a step is fixed cost, with {cost.rows} {samples} per rank and step",
        cause=f"A step takes {cost.step_seconds * 1e3:.1f} ms, and {cost.share * cost.step_seconds * 1e3:.1f} ms of that do not depend on how many samples there are: "
        + "; ".join(cost.facts)
        + ".",
        fix=(
            f"use a larger batch per rank{at}: twice as many samples per step give about {cost.gain(2):.1f} times as many per second, "
            f"eight times about {cost.gain(8):.1f} (as far as memory and learning allow)",
            "or use fewer ranks, and fewer and larger operations (torch.compile, a fused optimizer)",
        ),
        evidence=tuple(
            Evidence(f"rank {one.rank}: {fact}", f"rank{one.rank}/events.jsonl", one.rank)
            for one, row in costs[:4]
            for fact in row.facts
        ),
        certainty="possible" if cost.is_on_device else "likely",
        where=where,
    )


def usual_rows(view: RankView) -> int | None:
    """Samples that the rank gets in most of its steps; None when there are many, or they are not known."""
    event = view.last("pace")
    return max(event["by_rows"], key=lambda row: row[1])[0] if event is not None else None


def _on_host(run: RunView, view: RankView) -> FixedCost | None:
    shares, rows = measure_shares(view), usual_rows(view)
    models = list(wraps(view).values())
    if shares is None or rows is None or rows > MAX_ROWS or len(models) > 1 or shares.data > MAX_DATA:
        return None
    if shares.delayed_seconds > MAX_DELAYED * shares.total_seconds:
        return None  # on a machine that is busy with other things waits for other ranks are waits for a core
    latency = shares.communication if models and run.world_size > 1 else 0.0
    if models and latency >= communication_bound.MIN_SHARE and models[0]["bytes"] >= communication_bound.MIN_BYTES:
        return None  # it is the bytes, which another finding speaks of
    own, fact = _fixed_own(view)
    step = shares.total_seconds / shares.steps
    share = latency + (1 - latency) * own
    words = (
        f"{latency * step * 1e3:.1f} ms pass in averaging {format_bytes(models[0]['bytes'])} of gradients"
        if latency >= 0.1
        else ""
    )
    return FixedCost(rows, share, step, shares.total_seconds, tuple(filter(None, (words, fact))))


def _fixed_own(view: RankView) -> tuple[float, str]:
    """Of the rank's own time, the share that is the same for fewer samples; 0 when all steps had as many."""
    event = view.last("pace")
    sizes = [row for row in event["by_rows"] if row[1] >= MIN_STEPS_OF_A_SIZE] if event is not None else []
    if len(sizes) < 2 or sizes[-1][0] < MIN_SIZE_RATIO * sizes[0][0]:
        return 0.0, ""
    (few, _, less), (many, _, more) = sizes[0], sizes[-1]
    slope = max(0.0, more - less) / (many - few)
    fact = f"{many} samples take {more * 1e3:.2f} ms of work, {few} take {less * 1e3:.2f} ms"
    return max(0.0, 1 - slope * many / more), fact


def _on_device(view: RankView) -> FixedCost | None:
    """Where the host is asked to wait in each step and hardly does: it launches for all that time."""
    waits, rows = measure_waits(view), usual_rows(view)
    if waits is None or not waits.lines or rows is None or rows > MAX_ROWS_ON_DEVICE:
        return None
    total = view.page.seconds["total"] if view.page is not None else 0.0
    if waits.waited > MAX_WAITED or waits.data_seconds > MAX_DATA * waits.step_seconds:
        return None
    share = 1 - waits.waited - waits.data_seconds / waits.step_seconds
    fact = f"the device had done all it was given when the host asked for it, which waited {waits.waited_seconds * 1e3:.2f} ms per step"
    return FixedCost(rows, share, waits.step_seconds, total, (fact,), is_on_device=True)


def _loader_site(view: RankView) -> CallSite | None:
    trained = {lap["loader"] for lap in view.named("lap") if lap["backwards"]}
    rows = view.named("loader")
    found = next((row for row in rows if row["loader"] in trained), rows[0] if rows else None)
    return view.site(found["site"]) if found is not None else None

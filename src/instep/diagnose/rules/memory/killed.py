"""A rank was killed because memory ran out.

## What it sees
A rank was ended by SIGKILL, and the cgroup of this run has counted a kill for memory in the same time; how much the process had, what
that was made of, and what of it grew from step to step.

## Why it matters
The kernel ends the largest process without a word when the limit of the job, of the container or of the machine is reached.

## What to do
- Where memory grew with every step: do not keep what grows, at the line that is named.
- Where it did not: use a smaller `micro_batch`; the global batch and the numbers stay the same. Sharded parameters and optimizer state
  (`parallel="zero3"`) help where these are the largest part.
- Start fewer ranks on this machine, or fewer data loader workers (each is a process with its own memory).
- Raise the memory limit of the job or the container.

## When it is wrong
When something else in the same cgroup was killed for memory at the time at which this rank was killed for another reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from instep.diagnose.frames import source_line
from instep.diagnose.memory_shares import cite_kinds
from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.memory.kept_graphs import find_growth
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import CallSite, Evidence, Finding
from instep.units import format_bytes

MIN_GROWTH_BYTES = 64 << 20  # less is the allocator's, or caches that fill up
MIN_GROWTH_SHARE = 0.25  # of what the process had at its most


@dataclass(frozen=True)
class Growth:
    """From the first to the last reading of a rank's memory."""

    first_step: int
    last_step: int
    first_bytes: int
    last_bytes: int

    @property
    def per_step(self) -> float:
        return (self.last_bytes - self.first_bytes) / (self.last_step - self.first_step)


def check(run: RunView) -> Iterator[Finding]:
    killed = [view for view in run.ranks if (view.failure or {}).get("memory") and view.exit_code == -9]
    if not killed:
        return
    view = max(killed, key=lambda one: one.failure["peak_bytes"] if one.failure else 0)
    failure = view.failure or {}
    growth, holder = measure_growth(view), _holder(view)
    where = _line_of(holder) if holder is not None else None
    pid = f" (process {view.page.pid})" if view.page is not None else ""
    yield Finding(
        id="memory/killed",
        title=f"rank {view.rank}{pid} was killed because memory ran out; it had used {format_bytes(failure['peak_bytes'])}",
        cause=failure["memory"] + _what_grew(growth, holder, where),
        fix=_what_to_do(growth, holder, where),
        evidence=tuple(_cite(run, view, growth)),
        certainty="certain",
        ranks=tuple(one.rank for one in killed),
        where=where,
        explains=("memory/*", "crash/*", "hang/*", "numbers/*", "speed/*"),
    )


def measure_growth(view: RankView) -> Growth | None:
    """None when memory did not grow with the steps, or was not read twice."""
    readings = [(event.step, event["used"]) for event in view.named("memory")]
    if view.page is not None and view.page.resident_bytes:
        readings.append((view.num_steps, view.page.resident_bytes))
    if len(readings) < 2:
        return None
    (first_step, first), (last_step, last) = readings[0], readings[-1]
    grown = last - first
    if last_step <= first_step or grown < MIN_GROWTH_BYTES or grown < MIN_GROWTH_SHARE * last:
        return None
    return Growth(first_step, last_step, first, last)


def _holder(view: RankView) -> Event | None:
    """What was seen to hold more with every look."""
    return view.last("kept-graphs") or view.last("kept-tensors")


def _line_of(holder: Event) -> CallSite:
    return find_growth(holder) or CallSite(holder["file"], holder["line"], source_line(holder["file"], holder["line"]))


def _what_grew(growth: Growth | None, holder: Event | None, where: CallSite | None) -> str:
    if holder is not None:
        what = "results with their graphs" if holder.name == "kept-graphs" else "tensors"
        return f" What grew is {holder['name']} in {holder['function']}, which keeps {what} (line {where.line if where else 0})."
    if growth is None:
        return ""
    return f" Memory grew by about {format_bytes(int(growth.per_step))} with every step, after the first ones too."


def _what_to_do(growth: Growth | None, holder: Event | None, where: CallSite | None) -> tuple[str, ...]:
    if holder is not None and where is not None:
        keep = (
            "keep .item() or .detach() there"
            if holder.name == "kept-graphs"
            else "keep less of it, or write it to a file"
        )
        return (f"{keep}: {where}",)
    if growth is not None:
        return ("look for what the script adds to in every step: lists, dictionaries, caches of a data set",)
    return (
        "use a smaller micro-batch or fewer ranks on this machine",
        "or raise the memory limit of the job",
    )


def _cite(run: RunView, view: RankView, growth: Growth | None) -> Iterator[Evidence]:
    yield view.cite("killed by SIGKILL, which nothing can catch", "failure.json")
    rows = [(one.rank, one.failure["peak_bytes"]) for one in run.ranks if one.failure and one.failure.get("peak_bytes")]
    for rank, peak in rows[:4]:
        yield run.by_rank[rank].cite(f"rank {rank} had used {format_bytes(peak)} at most", "failure.json")
    yield from cite_kinds(view)
    if growth is not None:
        yield view.cite(
            f"{format_bytes(growth.first_bytes)} after step {growth.first_step}, {format_bytes(growth.last_bytes)} after step {growth.last_step}"
        )

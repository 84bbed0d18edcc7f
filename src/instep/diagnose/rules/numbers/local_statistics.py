"""Batch-norm statistics or other buffers differ between ranks when they are used.

## What it sees
A model wrapped with `broadcast_buffers=False` whose running means differ between ranks by a good part of their spread when it is switched to evaluation or at
the end, or whose other buffers (codebooks, moving averages) differ.

## Why it matters
Each rank normalises by what it has seen itself. Rank 0's statistics are saved and do not fit the data of the others.

## What to do
Leave `broadcast_buffers` on, use SyncBatchNorm, or average the buffers before evaluation and saving.

## When it is wrong
Each rank keeps and uses its own model on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.diagnose.model_facts import same_group, wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Evidence, Finding

MIN_GAP = 0.02  # relative, of a number made of the sizes of a buffer's elements
BATCH_NORM = (
    "the statistics of its own data",
    "or convert to SyncBatchNorm, or average the buffers before evaluation and saving",
)
OTHER = (
    "what it has computed from its own data (a codebook, a moving average)",
    "or all-reduce what the buffer is updated with, so that every rank makes the same update",
)
MIN_DISTANCE = 0.25  # of means, in standard deviations: differences of chance between halves of a data set are smaller


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole or not run.ranks:
        return
    for wrapper in wraps(run.ranks[0]):
        members = same_group(run, wrapper)
        worst, other = _worst(members, wrapper), _other(members, wrapper)
        where = run.ranks[0].site(wraps(run.ranks[0])[wrapper]["site"])
        if worst is not None and worst[1] >= MIN_DISTANCE:
            name, distance, step = worst
            size = f"by {distance:.1f} standard deviations"
            title = f"the ranks' batch-norm statistics differ when they are used: running mean of {name} {size}"
            yield _finding(title, f"running mean of {name} differs {size}", step, where, BATCH_NORM)
            return
        if other is not None:
            name, gap, step = other
            title = f"the ranks' buffers differ when they are used: {name} by {gap:.0%}"
            yield _finding(title, f"{name} differs by {gap:.0%}", step, where, OTHER)
            return


def _finding(title: str, fact: str, step: int, where: CallSite | None, words: tuple[str, str]) -> Finding:
    what, remedy = words
    return Finding(
        id="numbers/local-statistics",
        title=title,
        cause=f"The model wrapped at {short(where)} has broadcast_buffers=False, so each rank keeps {what}; the saved model has rank 0's.",
        fix=(f"leave broadcast_buffers on at {short(where)}", remedy),
        evidence=(Evidence(f"after step {step}: {fact}", "rank*/events.jsonl"),),
        certainty="certain",
        where=where,
    )


def _other(members: list[RankView], wrapper: int) -> tuple[str, float, int] | None:
    """The buffer of another kind that is furthest apart at the last moment that all ranks noted."""
    common, rows = _last_common(members, wrapper, "others")
    gaps = (
        [(name, gap) for name in rows[0] if (gap := _gap([row.get(name) for row in rows])) >= MIN_GAP] if rows else []
    )
    return (*max(gaps, key=lambda one: one[1]), common) if gaps else None


def _gap(values: list[float | None]) -> float:
    numbers = [value for value in values if value is not None]
    size = max((abs(value) for value in numbers), default=0.0)
    return (max(numbers) - min(numbers)) / size if len(numbers) == len(values) and size > 1e-12 else 0.0


def _last_common(members: list[RankView], wrapper: int, key: str) -> tuple[int, list[dict[str, Any]]]:
    """The last step at which all ranks noted their buffers, and what they noted."""
    tables = [
        {(one["evals"], one.step): one.facts.get(key, {}) for one in view.named("buffers") if one["wrapper"] == wrapper}
        for view in members
    ]
    common = sorted(at for at in tables[0] if all(at in table for table in tables)) if len(tables) > 1 else []
    return (common[-1][1], [table[common[-1]] for table in tables]) if common else (0, [])


def _worst(members: list[RankView], wrapper: int) -> tuple[str, float, int] | None:
    """The batch norm whose means are furthest apart at the last moment that all ranks noted."""
    step, rows = _last_common(members, wrapper, "values")
    if not rows:
        return None
    found = [(name, distance) for name in rows[0] if (distance := _distance([row[name] for row in rows])) is not None]
    return (*max(found, key=lambda one: one[1]), step) if found else None


def _distance(rows: list[list[list[float]]]) -> float | None:
    distances: list[float] = []
    for channel in range(len(rows[0][0])):
        means = [row[0][channel] for row in rows]
        spread = max(1e-12, sum(row[1][channel] for row in rows) / len(rows)) ** 0.5
        distances.append((max(means) - min(means)) / spread)
    return sum(distances) / len(distances) if distances else None

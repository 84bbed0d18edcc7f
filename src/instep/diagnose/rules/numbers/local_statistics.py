"""Batch-norm statistics differ between ranks when they are used.

## What it sees
A model wrapped with `broadcast_buffers=False` whose running means differ between ranks by a good part of their spread when it is switched to evaluation or at the end.

## Why it matters
Each rank normalises by what it has seen itself. Rank 0's statistics are saved and do not fit the data of the others.

## What to do
Leave `broadcast_buffers` on, use SyncBatchNorm, or average the buffers before evaluation and saving.

## When it is wrong
Each rank keeps and uses its own model on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.model_facts import same_group, wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.finding import Evidence, Finding

MIN_DISTANCE = 0.25  # of means, in standard deviations: differences of chance between halves of a data set are smaller


def check(run: RunView) -> Iterator[Finding]:
    if not run.is_whole:
        return
    for wrapper in wraps(run.ranks[0]):
        members = same_group(run, wrapper)
        worst = _worst(members, wrapper)
        if worst is None or worst[1] < MIN_DISTANCE:
            continue
        name, distance, step = worst
        where = run.ranks[0].site(wraps(run.ranks[0])[wrapper]["site"])
        yield Finding(
            id="numbers/local-statistics",
            title=f"the ranks' batch-norm statistics differ when they are used: running mean of {name} by {distance:.1f} standard deviations",
            cause=f"The model wrapped at {short(where)} has broadcast_buffers=False, so each rank keeps the statistics of its own data; the saved model has rank 0's.",
            fix=(
                f"leave broadcast_buffers on at {short(where)}",
                "or convert to SyncBatchNorm, or average the buffers before evaluation and saving",
            ),
            evidence=(
                Evidence(
                    f"after step {step}: running mean of {name} differs by {distance:.2f} standard deviations",
                    "rank*/events.jsonl",
                ),
            ),
            certainty="certain",
            where=where,
        )
        return


def _worst(members: list[RankView], wrapper: int) -> tuple[str, float, int] | None:
    """The batch norm whose means are furthest apart at the last moment that all ranks noted."""
    tables: list[dict[tuple[int, int], dict[str, list[list[float]]]]] = [
        {(one["evals"], one.step): one["values"] for one in view.named("buffers") if one["wrapper"] == wrapper}
        for view in members
    ]
    common = sorted(key for key in tables[0] if all(key in table for table in tables)) if len(tables) > 1 else []
    if not common:
        return None
    rows = [table[common[-1]] for table in tables]
    found = [(name, distance) for name in rows[0] if (distance := _distance([row[name] for row in rows])) is not None]
    return (*max(found, key=lambda one: one[1]), common[-1][1]) if found else None


def _distance(rows: list[list[list[float]]]) -> float | None:
    distances: list[float] = []
    for channel in range(len(rows[0][0])):
        means = [row[0][channel] for row in rows]
        spread = max(1e-12, sum(row[1][channel] for row in rows) / len(rows)) ** 0.5
        distances.append((max(means) - min(means)) / spread)
    return sum(distances) / len(distances) if distances else None

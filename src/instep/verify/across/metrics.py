"""Sums that the script takes over the ranks for its metrics: the same on any number of processes?"""

from __future__ import annotations

from typing import Any

from instep.verify.parting import Cause, Parting
from instep.verify.records import Record

CLOSE = 1e-3  # relative: beyond the drift of weights in a few steps


def judge_metrics(reference: Record, other: Record, until: int) -> Parting | None:
    """The first sum that is neither equal in both runs, nor proportional to the number of processes as sums of means."""
    times = other.world_size / reference.world_size
    for number in range(1, until + 1):
        pairs = zip(_metrics(reference, number), _metrics(other, number))
        for one, two in pairs:
            if one["line"] != two["line"] or one["op"] != two["op"] or len(one["after"]) != len(two["after"]):
                break
            scales = (1.0,) if one["op"] != "SUM" else (1.0, times)
            gaps = [min(abs(b - a * s) / max(abs(a * s), abs(b), 1e-12) for s in scales)
                    for a, b in zip(one["after"], two["after"])]  # fmt: skip
            if gaps and max(gaps) > CLOSE:
                return _parting(one, two, gaps, number, other, times)
    return None


def _metrics(record: Record, number: int) -> list[dict[str, Any]]:
    return record.step(number)[0].facts["metrics"]


def _parting(
    one: dict[str, Any], two: dict[str, Any], gaps: list[float], number: int, other: Record, times: float
) -> Parting:
    place = gaps.index(max(gaps))
    a, b = one["after"][place], two["after"][place]
    ranks = [update.facts["metrics"] for update in other.step(number)]
    parts = [m["before"][place] for each in ranks for m in each if m["line"] == two["line"]][: other.world_size]
    cause = Cause(
        "metric-averaged",
        f"{two['call']} at {two['line']} gives {b:.6g} on {other.world_size} processes ({b / times:.6g} as a mean over "
        f"ranks) and {a:.6g} on the reference, for the same weights. The ranks bring {', '.join(f'{p:.6g}' for p in parts)}"
        ": each has averaged over its own samples, of which it has another number than the others, or some samples are "
        "counted twice.",
        "Add sums and counts over the ranks and divide once: all_reduce of (sum, count), then sum / count; let every "
        "sample be evaluated once. In instep: run.mean(value, weight).",
        two["line"],
    )
    return Parting(number, "metric", "runs", other.world_size, cause, "", gaps[place], CLOSE)

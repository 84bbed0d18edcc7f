"""Sums that the script takes over the ranks for its metrics: the same on any number of processes?"""

from __future__ import annotations

from typing import Any

from instep.verify.parting import Cause, Parting, processes
from instep.verify.records import Record

CLOSE = 1e-3  # relative: beyond the drift of weights in a few steps
SAME = 1e-5  # relative: of two equal runs


def judge_metrics(reference: Record, other: Record, until: int, repeated: Record) -> Parting | None:
    """The first sum that is neither equal in both runs, nor proportional to the number of processes as sums of means.

    repeated: the reference run once more; what differs there (seconds, bytes) is no metric of the model.
    """
    times = other.world_size / reference.world_size
    for number in range(1, until + 1):
        for place, (one, two) in enumerate(zip(_metrics(reference, number), _metrics(other, number))):
            if one["line"] != two["line"] or one["op"] != two["op"] or len(one["after"]) != len(two["after"]):
                break
            parts = [update.facts["metrics"][place : place + 1] for update in other.step(number)]
            if two["op"] != "SUM" or not all(part and part[0]["line"] == two["line"] for part in parts):
                continue
            again = _metrics(repeated, number)[place]["after"] if _has(repeated, number, place) else one["after"]
            for element, (a, b, c) in enumerate(zip(one["after"], two["after"], again)):
                if abs(a - c) > SAME * max(abs(a), abs(c)):
                    continue
                brought = [part[0]["before"][element] for part in parts]
                gap = min(abs(b - a * scale) / max(abs(a * scale), abs(b), 1e-12) for scale in (1.0, times))
                if gap > CLOSE and (_is_mean(a, brought) or _is_count(a, b)):
                    return _parting(number, two, (a, b), brought, gap, other)
    return None


def _has(record: Record, number: int, place: int) -> bool:
    return record.num_steps >= number and len(_metrics(record, number)) > place


def _is_mean(whole: float, parts: list[float]) -> bool:
    """Whether the number of one process can be a mean of those of the ranks."""
    return min(parts) < whole < max(parts)


def _is_count(whole: float, total: float) -> bool:
    """Whether things were counted, some of them twice."""
    return whole.is_integer() and total.is_integer() and 0 < whole < total < 1.5 * whole


def _metrics(record: Record, number: int) -> list[dict[str, Any]]:
    return record.step(number)[0].facts["metrics"]


def _parting(
    number: int, seen: dict[str, Any], sums: tuple[float, float], brought: list[float], gap: float, other: Record
) -> Parting:
    whole, total = sums
    cause = Cause(
        "metric-averaged",
        f"{seen['call']} at {seen['line']} gives {total:.6g} on {processes(other.world_size)} "
        f"({total / other.world_size:.6g} as a mean over ranks) and {whole:.6g} on the reference, for the same weights. The "
        f"ranks bring {', '.join(f'{part:.6g}' for part in brought)}: each has averaged over its own samples, of which it "
        "has another number than the others, or some samples are counted twice.",
        "Add sums and counts over the ranks and divide once: all_reduce of (sum, count), then sum / count; let every "
        "sample be evaluated once. In instep: run.mean(value, weight).",
        seen["line"],
    )
    return Parting(number, "metric", "runs", other.world_size, cause, "", gap, CLOSE)

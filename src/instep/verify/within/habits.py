"""Calls that are wrong in themselves, whatever the numbers are: clipping, accumulation, dropout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from instep.verify.parting import Cause, Parting
from instep.verify.records import Record


def clipped_scaled(record: Record) -> Iterator[Parting]:
    for number in range(1, record.num_steps + 1):
        for clip in record.step(number)[0].facts["clips"]:
            if clip["scaled"] and clip["scale"] != 1.0:
                cause = Cause(
                    "clip-before-unscale",
                    f"{clip['call']} clips gradients that are still multiplied by the loss scale {clip['scale']:g}, so "
                    "that nearly every step is clipped, and what is left is far smaller than the limit.",
                    "Call scaler.unscale_(optimizer) before clipping.",
                    clip["line"],
                )
                yield Parting(number, "clipping", "ranks", record.world_size, cause)
                return


def accumulation(record: Record) -> Iterator[Parting]:
    """Groups of micro-batches: each loss is divided by d, so a step should be made of d of them."""
    sizes: Counter[int] = Counter()
    rows: list[tuple[int, int, float, str]] = []
    for number in range(1, record.num_steps + 1):
        passes = record.step(number)[0].facts["backwards"]
        divisors = {one["divisor"] for one in passes}
        if len(divisors) == 1 and (divisor := divisors.pop()) is not None and divisor > 1.5:
            rows.append((number, len(passes), divisor, passes[-1]["line"]))
            sizes[round(divisor)] += len(passes) == round(divisor)
    for number, count, divisor, line in rows:
        if sizes[round(divisor)] and count != round(divisor):
            cause = _group_cause(count, round(divisor), number, line)
            yield Parting(number, "micro-batches", "ranks", record.world_size, cause, "", abs(count / divisor - 1), 0.0)
            return


def _group_cause(count: int, usual: int, number: int, line: str) -> Cause:
    seen = f"Step {number} adds {count} micro-batches, each divided by {usual}: their weights add up to {count}/{usual}"
    if count < usual:
        return Cause(
            "incomplete-group",
            f"{seen}. The last group of an epoch is shorter than the others, and its gradient is too small by that.",
            "Divide by the number of micro-batches that the group has, or drop the batches that do not fill one.",
            line,
        )
    return Cause(
        "incomplete-group",
        f"{seen}. Micro-batches that were left at the end of an epoch did not fill a group; their gradients stayed and "
        "went into the first step of the next epoch.",
        "Step with the shorter last group (divided by its own size), or clear gradients at the end of an epoch.",
        line,
    )


def dropout_streams(record: Record) -> Iterator[Parting]:
    """Ranks whose generators stand at the same place before they draw masks."""
    if record.world_size < 2 or record.uses_run:
        return
    for number in range(1, record.num_steps + 1):
        facts = [update.facts for update in record.step(number)]
        if not all(one["drops"] for one in facts) or any(one["sharded"] and one["mesh_axes"] > 1 for one in facts):
            continue
        states = {one["random"] for one in facts}
        if len(states) == 1 and None not in states:
            line = facts[0]["backwards"][-1]["line"] if facts[0]["backwards"] else ""
            cause = Cause(
                "dropout-streams",
                f"The generators of all {record.world_size} ranks stand at the same place before the forward of step "
                f"{number}: every rank drops the same elements of different samples, while one process draws a mask for "
                "each sample of the batch.",
                "After the model is built and wrapped, seed each rank by its own number: torch.manual_seed(seed + rank).",
                line,
            )
            yield Parting(number, "dropout", "ranks", record.world_size, cause)
            return

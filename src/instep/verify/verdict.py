"""The verdict on all runs together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from instep.verify.across.judge import Comparison, compare_runs
from instep.verify.parting import Parting, processes
from instep.verify.records import Record
from instep.verify.run_one import Run
from instep.verify.within.judge import judge_ranks

Kind = Literal["in step", "parted", "not judged"]
EXIT_CODES: dict[Kind, int] = {"in step": 0, "parted": 1, "not judged": 3}
# Between runs these are facts of their own; everything else follows from what the ranks of the larger run do wrong.
_OWN = ("initial weights", "learning rate", "metric", "parameter order")


@dataclass
class Verdict:
    kind: Kind
    reference_size: int
    steps: int
    partings: list[Parting] = field(default_factory=list[Parting])
    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    questions: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def as_json(self) -> dict[str, Any]:
        """What JSON cannot hold, infinities and what is not a number, is null."""
        return _finite(self._as_json())

    def _as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.kind,
            "reference_processes": self.reference_size,
            "steps": self.steps,
            "partings": [parting.as_json() for parting in self.partings],
            "not_judged": self.questions,
            "notes": self.notes,
            "comparisons": [
                {
                    "processes": each.world_size,
                    "tolerance": each.tolerance.describe(),
                    "rows": [row.as_json() for row in each.rows],
                }
                for each in self.comparisons
            ],
        }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def judge(runs: list[Run], exact: bool, repeat: Callable[[], Record]) -> Verdict:
    """runs: the fewest processes first; repeat: runs that one again, called when a metric is in question."""
    reference, repeat = runs[0].record, cache(repeat)
    verdict = Verdict("in step", reference.world_size, max(run.record.num_steps for run in runs))
    verdict.questions += [run.failure for run in runs if run.failure]
    for run in runs:
        inside = judge_ranks(run.record)
        verdict.partings += inside
        if run is not runs[0] and run.record.num_steps and reference.num_steps:
            comparison = compare_runs(reference, run.record, exact, repeat)
            verdict.comparisons.append(comparison)
            verdict.questions += [text for text in comparison.open_questions if text not in verdict.questions]
            verdict.notes += [text for text in comparison.by_rights if text not in verdict.notes]
            verdict.partings += _beside(comparison.partings, inside)
        verdict.notes += _notes(run)
    verdict.partings = _order(verdict.partings)
    if verdict.partings:
        verdict.kind = "parted"
    elif verdict.questions:
        verdict.kind = "not judged"
    return verdict


def _beside(between: list[Parting], inside: list[Parting]) -> list[Parting]:
    """Partings of the runs that do not follow from what the ranks of one do. Equal masks give no rank other samples."""
    first = min((parting.step for parting in inside), default=math.inf)
    first_but_masks = min((parting.step for parting in inside if parting.quantity != "dropout"), default=math.inf)
    causes = {parting.cause.id for parting in inside}
    return [
        each
        for each in between
        if (each.quantity in _OWN or each.step < (first_but_masks if each.quantity == "samples" else first))
        and each.cause.id not in causes
    ]


def _order(partings: list[Parting]) -> list[Parting]:
    """The first step first, ranks of one run before runs; one cause once. Other samples come before equal masks."""
    late = {"dropout": 2, "metric": 3}
    ordered = sorted(
        partings,
        key=lambda one: (one.step, late.get(one.quantity, one.between != "ranks"), one.world_size),
    )
    seen: dict[str, Parting] = {}
    for parting in ordered:
        seen.setdefault(parting.cause.id, parting)
    return list(seen.values())


def _notes(run: Run) -> list[str]:
    divided = [
        f"DataLoader at {note['line']}: batch size {note['given']} -> {note['used']} on {processes(run.record.world_size)}"
        for note in (run.record.ranks[0].named("loader") if run.record.ranks else [])
        if note["used"] != note["given"]
    ]
    return list(dict.fromkeys(divided))

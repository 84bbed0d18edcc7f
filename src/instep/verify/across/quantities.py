"""The differences between a run and the one with the fewest processes, step by step. No judgement of causes here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy

from instep.verify.records import Record, Update
from instep.verify.tolerance import Tolerance
from instep.verify.vectors import Vectors, farthest, mean, norm, scales
from instep.verify.within.weights import sizes_of


@dataclass(frozen=True)
class Difference:
    """relative and tolerance: of the parameter that is farthest beyond its own; name: which."""

    relative: float
    tolerance: float
    name: str = ""

    @property
    def is_beyond(self) -> bool:
        return not self.relative <= self.tolerance


@dataclass(frozen=True)
class StepRow:
    """One line of the table. None: cannot be compared. samples: in the smaller run, in the larger one, in both."""

    step: int
    samples: tuple[int, int, int]
    losses: tuple[float | None, float | None]
    rates: tuple[list[float], list[float]]
    differences: dict[str, Difference] = field(default_factory=dict[str, Difference])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def same_samples(self) -> bool:
        return self.samples[0] == self.samples[1] == self.samples[2]


# What these communication hooks of torch round gradients to.
HOOKS = {"fp16_compress_hook": "float16", "bf16_compress_hook": "bfloat16"}


def choose_tolerance(reference: Record, other: Record) -> Tolerance:
    facts = [update.facts for update in reference.step(1)]
    rows = sum(len(one["samples"]) for one in facts)
    positions = max(one["outputs"] for one in facts)
    fan_in = max((math.prod(shape[1:]) for one in facts for shape in one["shapes"] if len(shape) > 1), default=1)
    dtypes = [dtype for one in facts for dtype in one["dtypes"]]
    coarsest = next((name for name in ("bfloat16", "float16", "float32") if name in dtypes), "float64")
    hook = HOOKS.get(other.step(1)[0].facts.get("hook") or "")
    low = next((one["low_precision"] for one in facts if one["low_precision"]), hook)
    return Tolerance(coarsest, max(1, rows) * max(1, positions) + fan_in, low)


class Noise:
    """Elements whose gradient is rounding and nothing else: Adam makes full steps of it, in any direction."""

    def __init__(self) -> None:
        self._of: dict[str, Any] = {}

    def look(self, gradients: Vectors, relative: float) -> None:
        sizes = scales(gradients)
        for name, vector in gradients.items():
            level = max(relative, 1e-6) * sizes[name] / math.sqrt(max(1, vector.size))
            quiet = numpy.abs(vector) <= level
            self._of[name] = quiet | self._of[name] if name in self._of else quiet

    def leave_out(self, name: str, vector: Any) -> Any:
        quiet = self._of.get(name)
        return numpy.where(quiet, 0.0, vector) if quiet is not None and quiet.shape == vector.shape else vector

    def distance(self, one: Vectors, other: Vectors) -> float:
        """How far those elements are apart by now."""
        gaps = [norm((one[name] - other[name])[quiet]) for name, quiet in self._of.items()
                if name in one and name in other and one[name].shape == other[name].shape == quiet.shape]  # fmt: skip
        return norm(gaps)


def compare_step(
    reference: Record, other: Record, number: int, tolerance: Tolerance, noise: Noise, averaged: bool = False
) -> StepRow:
    """Everything that the two runs have of one step; `noise` collects over the steps, so take them in order.
    averaged: the other run averages parameters after each step, not gradients before it."""
    one, two = reference.step(number)[0], other.step(number)[0]
    samples = (reference.samples(number), other.samples(number))
    both = samples[0] & samples[1]
    losses = (reference.loss(number), other.loss(number))
    row = StepRow(
        number,
        (samples[0].total(), samples[1].total(), both.total()),
        losses,
        (one.facts["rates"], two.facts["rates"]),
    )
    theirs = [update.unscaled("reduced") for update in other.step(number)]
    parameters = two.vectors["param"]
    if averaged:
        theirs = [mean(theirs)]
        parameters = mean([update.vectors["param"] for update in other.step(number)])
    gradients = one.unscaled("reduced"), theirs[0]
    sizes = _sizes_with_terms(reference.step(number), gradients[0])
    noise.look(gradients[0], tolerance.gradient(number))
    found = row.differences
    if one.vectors["start"] and two.vectors["start"]:
        gap = farthest(one.vectors["start"], two.vectors["start"], sizes_of(one.vectors["start"]))
        found["initial weights"] = Difference(gap.relative, 1e-6, gap.name)
    if losses[0] is not None and losses[1] is not None:
        found["loss"] = _compare_losses(losses[0], losses[1], reference, number, tolerance.loss(number))
    gap = max(
        (farthest(gradients[0], each, sizes) for each in theirs),
        key=lambda gap: gap.relative,
    )
    found["gradients"] = Difference(gap.relative, tolerance.gradient(number), gap.name)
    norms = [norm([norm(v) for v in each.values()]) for each in gradients]
    if norms[0]:
        found["gradient norm"] = Difference(abs(norms[1] - norms[0]) / norms[0], tolerance.gradient(number))
    found["parameters"] = _compare_parameters(reference, one, parameters, number, tolerance, noise)
    found["buffers"] = _compare_buffers(one, two, tolerance.gradient(number), noise)
    return row


def _sizes_with_terms(updates: list[Update], gradients: Vectors) -> dict[str, float]:
    """A gradient that is small because the ranks' parts cancel is compared with the parts."""
    sizes = scales(gradients)
    scale = float(updates[0].facts["scale"])
    for update in updates:
        for name, vector in update.vectors["local"].items():
            if name in sizes:
                sizes[name] = max(sizes[name], norm(vector) / scale / len(updates))
    return sizes


def _compare_losses(one: float, two: float, reference: Record, number: int, tolerance: float) -> Difference:
    """Relative to the largest loss of a micro-batch, as a policy loss may cancel to nothing."""
    parts = [abs(each["loss"] or 0.0) for update in reference.step(number) for each in update.facts["backwards"]]
    size = max(abs(one), max(parts, default=0.0) / 10, 1e-12)
    gap = abs(two - one) / size
    return Difference(gap if not math.isnan(gap) else math.inf, tolerance)


def _compare_parameters(
    reference: Record, update: Update, others: Vectors, number: int, tolerance: Tolerance, noise: Noise
) -> Difference:
    worst = Difference(0.0, tolerance.parameter(number, 1.0, 0.0))
    start = _first_start(reference, update)
    for name, vector in update.vectors["param"].items():
        other = others.get(name)
        if other is None or other.shape != vector.shape:
            continue
        size = norm(vector)
        moved = norm(noise.leave_out(name, vector - start[name])) if name in start else size
        allowed = tolerance.parameter(number, size, moved)
        gap = norm(noise.leave_out(name, other - vector))
        if not size or math.isnan(gap):
            continue
        found = Difference(gap / size, allowed / size, name)
        if found.relative * worst.tolerance > worst.relative * found.tolerance:
            worst = found
    return worst


def _compare_buffers(one: Update, two: Update, tolerance: float, noise: Noise) -> Difference:
    """A bias in front of batch norm is noise, and the running mean moves with it."""
    drift = noise.distance(one.vectors["param"], two.vectors["param"])
    worst = Difference(0.0, tolerance)
    for name, vector in one.vectors["buffer"].items():
        other = two.vectors["buffer"].get(name)
        size = norm(vector)
        if other is not None and other.shape == vector.shape and size:
            gap, allowed = norm(other - vector) / size, tolerance + drift / size
            if gap * worst.tolerance > worst.relative * allowed:
                worst = Difference(gap, allowed, name)
    return worst


def _first_start(record: Record, update: Update) -> Vectors:
    updates = record.ranks[0].updates
    wanted = update.facts["optimizer"]
    return next((u.vectors["start"] for u in updates if u.facts["optimizer"] == wanted and u.vectors["start"]), {})

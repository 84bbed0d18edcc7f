"""Medians, spreads and bootstrap intervals of measured times."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Times:
    """Of single steps, in microseconds. spread: from the 25th to the 75th percentile."""

    p10: float
    median: float
    mean: float
    spread: float


@dataclass(frozen=True)
class Ratio:
    """Time over the baseline's, round by round: the median over rounds and the 95 % interval of that median."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def summarise(seconds: list[list[float]]) -> Times:
    """seconds: per round, per step."""
    flat = np.concatenate([np.asarray(block) for block in seconds]) * 1e6
    p10, p25, p50, p75 = np.percentile(flat, [10, 25, 50, 75])
    return Times(float(p10), float(p50), float(flat.mean()), float(p75 - p25))


def paired_ratio(ours: list[list[float]], theirs: list[list[float]], draws: int = 4000) -> Ratio:
    """Of whole blocks, which follow one another in time, so that a busy machine hits both alike."""
    ratios = np.array([sum(a) / sum(b) for a, b in zip(ours, theirs)])
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (draws, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def paired_difference(ours: list[list[float]], theirs: list[list[float]], draws: int = 4000) -> Ratio:
    """Median step of ours minus that of theirs, round by round, in microseconds."""
    differences = np.array([np.median(a) - np.median(b) for a, b in zip(ours, theirs)]) * 1e6
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(differences, (draws, len(differences))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(differences)), float(low), float(high))


def as_row(value: Times | Ratio) -> dict[str, float]:
    return asdict(value)

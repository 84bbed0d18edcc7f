"""Medians, spreads and bootstrap intervals of measured times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Times:
    """Of single steps, in microseconds. spread: from the 25th to the 75th percentile."""

    p10: float
    median: float
    mean: float
    spread: float


@dataclass(frozen=True)
class Interval:
    """The median over rounds, and the 95 % interval of that median."""

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


def paired_ratio(ours: list[list[float]], theirs: list[list[float]], draws: int = 4000) -> Interval:
    """Time of our blocks over that of theirs just before or after, so that a busy machine hits both alike."""
    return median_of(np.array([sum(a) / sum(b) for a, b in zip(ours, theirs)]), draws)


def paired_difference(ours: list[list[float]], theirs: list[list[float]], draws: int = 4000) -> Interval:
    """Median step of ours minus that of theirs, round by round, in microseconds."""
    return median_of(np.array([np.median(a) - np.median(b) for a, b in zip(ours, theirs)]) * 1e6, draws)


def median_of(values: np.ndarray, draws: int) -> Interval:
    medians = np.median(np.random.default_rng(0).choice(values, (draws, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))

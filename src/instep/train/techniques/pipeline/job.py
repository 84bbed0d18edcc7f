"""A micro-batch on its way through the stages: what it is computed from, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from instep.train.techniques.pipeline.trace import Plan


@dataclass
class Result:
    """Of one micro-batch. given: the weight came from the script."""

    weight: float = 0.0
    loss: Any = 0.0  # a tensor where it was computed, so that nothing waits for it while the schedule runs
    given: bool = False

    @property
    def weighted_loss(self) -> float:
        return float(self.loss) * self.weight if self.weight else 0.0

    def numbers(self) -> list[float]:
        return [self.weight, float(self.loss), float(self.given)]

    @staticmethod
    def of(numbers: Sequence[float]) -> Result:
        weight, loss, given = numbers
        return Result(weight, loss, bool(given))


@dataclass(frozen=True)
class Call:
    """A micro-batch, and what the model and the loss get of it."""

    batch: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any


@dataclass
class Job:
    """One micro-batch of a pass."""

    plan: Plan
    call: Call
    begin: Callable[[], None]  # sets random generators and buffers for this micro-batch
    end: Callable[[], None]
    discard: Callable[[], None]  # in the place of `end` where buffers have to stay as they were
    read_weight: Callable[[Any, Any], tuple[float, float]]  # (loss, weight) -> the weight, and the factor of the loss
    result: Result = field(default_factory=Result)

    def repeated(self) -> Job:
        """Once more, adding nothing."""
        return replace(self, end=self.discard, read_weight=lambda _loss, _weight: (0.0, 0.0), result=Result())

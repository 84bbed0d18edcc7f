"""The loss of a micro-batch, as the last stage sends it backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.train.forward_backward import read_loss

if TYPE_CHECKING:
    from instep.train.techniques.pipeline.pipeline import Job


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


def weigh_loss(found: Any, job: Job, roots: Callable[[], Sequence[Tensor]]) -> Tensor:
    """The loss times its factor; notes loss and weight in the job. Weight 0 sends zeros to the roots, whatever the loss is."""
    loss, weight = read_loss(found)
    value, factor = job.read_weight(loss, weight)
    job.result = Result(value, loss.detach() if value else 0.0, weight is not None)
    if value == 0:
        return _Nothing.apply(*roots())  # type: ignore[no-any-return]
    return loss.sum() * factor  # shape (), and no view, which torch's zero-bubble schedules cannot detach


class _Nothing(torch.autograd.Function):
    """0, with zeros for gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)

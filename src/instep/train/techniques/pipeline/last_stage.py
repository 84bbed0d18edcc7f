"""The loss of a micro-batch, as the last stage sends it backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.train.absent import check_loss
from instep.train.forward_backward import read_loss
from instep.train.techniques.pipeline.job import Job, Result


def weigh_loss(found: Any, job: Job, roots: Callable[[], Sequence[Tensor]]) -> Tensor:
    """The loss times its factor; notes loss and weight in the job. Weight 0 sends zeros to the roots, whatever the loss is."""
    loss, weight = read_loss(found)
    check_loss(loss)
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

"""The parameters of a stage shared out over ranks, on PyTorch's FSDP2, with its collectives outside of the schedule.

Private in torch: that FSDP2's reduction is started by hand. torch.distributed.pipelining does it as well, and its
method is what is called here (a test notices a change).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from instep.errors import UsageError
from instep.train.absent import is_absent
from instep.train.techniques.pipeline.pipeline import Pipeline


class ShardedStages:
    """mesh: of the ranks that hold the same stages, axes (replicate,) shard. Every rank must make the same calls."""

    def __init__(self, pipeline: Pipeline, mesh: DeviceMesh) -> None:
        loose = pipeline.loose_parameters()
        if loose:
            raise UsageError(
                f"a pipeline with sharding shares out whole modules, and {', '.join(loose)} belongs to a module that lies in "
                "several stages. Put it into a module of its own, or leave shard out of the split."
            )
        self._units: Sequence[Any] = [module for module in pipeline.held_modules() if _is_sharded_here(module)]
        for unit in self._units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
            unit.set_gradient_divide_factor(1.0)  # sums; the mean over items is taken once, at the update
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
        self._is_whole = False

    def gather(self) -> None:
        """Whole parameters in place, and no collective in forward and backward until `reduce` or `scatter`."""
        if self._is_whole:
            return
        self._is_whole = True
        for unit in self._units:
            fully_shard.state(unit)._lazy_init()  # type: ignore[attr-defined]  # else by the first forward, if there is one
            unit.set_is_last_backward(False)
            unit.set_reshard_after_backward(False)
            unit.set_requires_gradient_sync(False)
            unit.unshard()

    def scatter(self) -> None:
        """Back to this rank's parts."""
        if self._is_whole:
            self._is_whole = False
            for unit in self._units:
                unit.reshard()

    def reduce(self) -> None:
        """Sums the gradients over ranks; each keeps its part, and of the parameters too."""
        if not self._is_whole:
            return
        self._is_whole = False
        for unit in self._units:
            for parameter in unit.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # every rank takes part with the same tensors
            PipelineStage.perform_reduce_grad(SimpleNamespace(submod=unit), 1)  # type: ignore[arg-type]


def _is_sharded_here(module: nn.Module) -> bool:
    return any(not is_absent(parameter) for parameter in module.parameters())

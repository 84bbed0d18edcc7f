"""The parameters of a stage shared out over ranks, on PyTorch's FSDP2, with its reduction outside of the schedule.

A schedule runs forward and backward in an order of its own, which FSDP2 does not know. Two ways are right in it: blocks
are gathered before the first micro-batch and stay whole up to the reduction, with no collective in between; or a block is
whole only while it runs, which takes whole backward passes and the same schedule on all ranks that share the stage.

Private in torch: that FSDP2's reduction is started by hand. torch.distributed.pipelining does it as well, and its
method is what is called here (a test notices a change). And where FSDP2 keeps the whole parameters between gathers.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage

from instep.errors import UsageError
from instep.train.absent import is_absent
from instep.train.reduce.local_part import local_part
from instep.train.techniques.blocks import find_blocks
from instep.train.techniques.pipeline.lockstep import Passes, plan_passes
from instep.train.techniques.pipeline.pipeline import Pipeline
from instep.train.techniques.shard import sharded_modules
from instep.train.world import World


class Held(Enum):
    """What this rank has of its stages' parameters."""

    PARTS = 0
    BLOCKS = 1  # a block is whole while it runs
    WHOLE = 2


class Together(nn.Module):
    """Modules that share a parameter, as one unit, which is gathered by hand only."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules_of_stages = nn.ModuleList(modules)

    def forward(self) -> None:
        """Nothing calls it; FSDP2 takes no module without one."""


def group_tied(modules: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Those that share parameters together, the others alone: FSDP2's units cannot own one tensor with another."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for module in modules:
        ids = {id(parameter) for parameter in module.parameters()}
        sharing = [group for group in groups if group[0] & ids]
        groups = [group for group in groups if not group[0] & ids]
        groups.append((ids.union(*(held for held, _ in sharing)), [m for _, some in sharing for m in some] + [module]))
    return [some for _, some in groups]


class ShardedStages:
    """mesh, data: of the ranks that hold the same stages, axes (replicate,) shard. Every rank must make the same calls.

    stays_whole: from the first micro-batch of a step to its reduction.
    """

    def __init__(
        self, pipeline: Pipeline, mesh: DeviceMesh, data: World, policy: OffloadPolicy, *, stays_whole: bool
    ) -> None:
        loose = pipeline.loose_parameters()
        if loose:
            raise UsageError(
                f"a pipeline with sharding shares out whole modules, and {', '.join(loose)} belongs to a module that lies in "
                "several stages. Put it into a module of its own, or leave shard out of the split."
            )
        self.stays_whole, self._data = stays_whole, data
        self._places = [(stage, module) for stage, module in pipeline.held_modules() if _is_sharded_here(module)]
        groups = group_tied([module for _, module in self._places])
        assert stays_whole or all(len(group) == 1 for group in groups)
        self._units: Sequence[Any] = [group[0] if len(group) == 1 else Together(group) for group in groups]
        self.whole_bytes = sum(_count_bytes(unit) for unit in self._units)  # of this rank's stages
        self.block_bytes = 0  # of the largest part that is gathered at once
        for unit in self._units:
            blocks = find_blocks(unit)
            sizes = [_count_bytes(block) for block in blocks]
            self.block_bytes = max(self.block_bytes, _count_bytes(unit) - sum(sizes), *sizes)
            for module in [*blocks, unit]:
                fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
        for module in self._modules():
            module.set_gradient_divide_factor(1.0)  # sums; the mean over items is taken once, at the update
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply on the way
        self._held = Held.PARTS

    def _modules(self) -> list[Any]:
        return [module for unit in self._units for module in sharded_modules(unit)]

    def _begin(self, held: Held) -> None:
        self._held = held
        for unit in self._units:
            fully_shard.state(unit)._lazy_init()  # type: ignore[attr-defined]  # else by the first forward, if there is one
            unit.set_is_last_backward(False)
            unit.set_requires_gradient_sync(False)
            unit.set_reshard_after_forward(held is Held.BLOCKS)
            unit.set_reshard_after_backward(held is Held.BLOCKS)

    @property
    def is_whole(self) -> bool:
        return self._held is Held.WHOLE

    @property
    def gathers_by_block(self) -> bool:
        return self._held is Held.BLOCKS

    def agree(self, runs: Sequence[int], can_repeat: bool) -> Passes:
        """runs: how many micro-batches go through each schedule of a pass here. Every rank must call it."""
        return plan_passes(self._data.gather_objects((list(runs), can_repeat), "step.forward_backward"))

    def gather(self) -> None:
        """Whole parameters in place, and no collective in forward and backward until `reduce` or `scatter`."""
        if self._held is not Held.WHOLE:
            self._begin(Held.WHOLE)
            for module in self._modules():
                module.unshard()

    def gather_by_block(self) -> None:
        """Forward and backward gather a block's parameters, each for itself, until `reduce`."""
        if self._held is Held.WHOLE:
            self.scatter()
        if self._held is not Held.BLOCKS:
            self._begin(Held.BLOCKS)

    def scatter(self) -> None:
        """Back to this rank's parts; gradients that are here stay."""
        if self._held is Held.WHOLE:
            for module in self._modules():
                module.reshard()
        self._held = Held.PARTS

    def reduce(self) -> None:
        """Sums the gradients over ranks; each keeps its part, and of the parameters too."""
        if self._held is Held.PARTS:
            return
        self._held = Held.PARTS
        for unit in self._units:
            for module in sharded_modules(unit):
                module.unshard()  # no collective where they are whole already
            for parameter in unit.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # every rank takes part with the same tensors
            PipelineStage.perform_reduce_grad(SimpleNamespace(submod=unit), 1)  # type: ignore[arg-type]

    def drop(self) -> None:
        """Forgets gradients that nothing has reduced. No collective: the ranks may not be together any more."""
        if self._held is not Held.PARTS:
            self.scatter()
            for parameter in _whole_parameters(self._modules()):
                parameter.grad = None

    @contextlib.contextmanager
    def only(self, stage: int) -> Iterator[None]:
        """Modules of the other stages here are not run, and so not gathered either."""
        modules = [module for place, unit in self._places if place != stage for module in unit.modules()]
        kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in modules]
        for module in modules:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            for module, before, after in kept:
                module._forward_pre_hooks, module._forward_hooks = before, after


def _is_sharded_here(module: nn.Module) -> bool:
    return any(not is_absent(parameter) for parameter in module.parameters())


def _count_bytes(module: nn.Module) -> int:
    """Of a module's parameters on this rank, whole."""
    parts = [local_part(parameter) for parameter in module.parameters()]
    return sum(part.numel() * part.element_size() for part in parts)


def _whole_parameters(modules: Sequence[Any]) -> Iterator[nn.Parameter]:
    """Those that were gathered at least once; between gathers they have no memory, but gradients."""
    for module in modules:
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for held in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            if hasattr(held, "_unsharded_param"):
                yield held._unsharded_param

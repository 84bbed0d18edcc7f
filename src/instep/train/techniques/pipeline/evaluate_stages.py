"""A model that is cut into stages, called without gradients: its output on every rank of the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from instep.errors import UsageError
from instep.train.techniques.pipeline.carry import pack, with_states
from instep.train.techniques.pipeline.trace import Plan

if TYPE_CHECKING:
    from instep.train.techniques.pipeline.pipeline import Pipeline


def evaluate_stages(pipeline: Pipeline, args: Any, kwargs: Any) -> Any:
    """Every rank of the pipeline must call it. Raises UsageError where gradients would be expected."""
    if torch.is_grad_enabled():
        raise UsageError(
            f"{type(pipeline.model).__name__} is cut into {pipeline.cuts.count} stages of a pipeline, so its output has no "
            "gradients: train it with step.forward_backward(model, loss_fn) in place of the inner loop. Called under "
            "torch.no_grad(), as in run.evaluate, it gives its output on every rank."
        )
    plan, ranks, world = pipeline.plan(args, kwargs), pipeline.ranks, pipeline.world
    received: list[Tensor] = []
    output: Any = None
    for stage, rank in enumerate(ranks):
        if rank != world.rank:
            continue
        if stage and ranks[stage - 1] != rank:
            received = _receive(pipeline, stage, plan)
        output = pipeline.compute(stage, plan, received, args, kwargs)
        if stage < pipeline.cuts.count - 1:
            received = list(pack(output, plan.boundaries[stage].carried, plan.draws, world.device))
            if ranks[stage + 1] != rank:
                for tensor in received:
                    dist.send(tensor, group_dst=ranks[stage + 1], group=pipeline.group)
    return _spread(pipeline, plan, output)


def _receive(pipeline: Pipeline, stage: int, plan: Plan) -> list[Tensor]:
    device = pipeline.world.device
    carried = with_states(plan.boundaries[stage - 1].carried, plan.draws, device)
    tensors = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in carried]
    for tensor in tensors:
        dist.recv(tensor, group_src=pipeline.ranks[stage - 1], group=pipeline.group)
    return tensors


def _spread(pipeline: Pipeline, plan: Plan, output: Any) -> Any:
    """The last stage's output on every rank of the pipeline."""
    last, world = pipeline.ranks[-1], pipeline.world
    leaves = tree_flatten(output)[0] if last == world.rank else list(plan.leaves)
    for place, planned in enumerate(plan.leaves):
        if not isinstance(planned, Tensor):
            continue
        if last == world.rank:
            leaves[place] = leaves[place].to(world.device).contiguous()
        else:
            leaves[place] = torch.empty(planned.shape, dtype=planned.dtype, device=world.device)
        dist.broadcast(leaves[place], group_src=last, group=pipeline.group)
    assert plan.spec is not None
    return tree_unflatten(leaves, plan.spec)

"""What `run.prepare` does to an optimizer: the right reducer for its parameters, and guards against other use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from instep.errors import RanksDisagree
from instep.records.parallel import Parallel
from instep.train.first_weights import broadcast_weights, follow_parameters
from instep.train.fused import choose_fused
from instep.train.parts import Given, loose_parameters
from instep.train.reduce.choose import choose_reducer, choose_transport
from instep.train.reduce.local_reducer import LocalReducer
from instep.train.reduce.reducer import Reducer
from instep.train.reduce.shard_reducer import ShardReducer
from instep.train.reduce.spread import choose_spread
from instep.train.reduce.stage_reducer import StageReducer
from instep.train.reduce.stage_shard_reducer import StageShardReducer
from instep.train.skips import Skips
from instep.train.techniques.local_sgd import check_local_sgd
from instep.train.techniques.optimizer_shares import OptimizerShares
from instep.train.techniques.pipeline.pipeline import Pipeline
from instep.train.update import Scheduler, Trained, count_steps

if TYPE_CHECKING:
    from instep.train.run import Run


def take_optimizer(run: Run, given: Given, name: str) -> Trained:
    """name: of its model, for messages. Every rank must call it."""
    optimizer = given.optimizer
    loose = _place_loose(run, optimizer, name)
    choice = choose_fused(optimizer, run._models)
    if choice is not None:
        run._observer.say(str(choice))
    parameters = _order_parameters(run, optimizer, loose, f"run.prepare of {name}")
    reducer = _make_reducer(run, given, parameters)
    trained = Trained(optimizer, reducer, parameters, Skips(run._observer.say, run._loss_scale.enabled))
    if given.split.share_optimizer and run._grid.data.size > 1:
        spread = choose_spread(reducer.transport, run._grid.data)
        trained.shares = OptimizerShares(run._grid.data, parameters, spread)
        trained.shares.drop_others(optimizer)
    trained.guard_step()
    trained.guard_zero_grad()
    if given.scheduler is not None:
        plateau = isinstance(given.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        every, steps = "value" if plateau else given.every, count_steps(given.scheduler)
        trained.schedulers.append(Scheduler(given.scheduler, every, steps))
    return trained


def _place_loose(run: Run, optimizer: torch.optim.Optimizer, name: str) -> dict[str, nn.Parameter]:
    """The optimizer's parameters that belong to no model, now on the device and with rank 0's values."""
    world = run._entered()
    loose = loose_parameters(optimizer, run._models)
    for parameter in loose.values():
        parameter.data = parameter.data.to(world.device)
    broadcast_weights(loose, world, run._group, f"the optimizer of {name}")
    follow_parameters(optimizer)
    return loose


def _order_parameters(
    run: Run, optimizer: torch.optim.Optimizer, loose: dict[str, nn.Parameter], what: str
) -> list[nn.Parameter]:
    """The optimizer's parameters in rank 0's order, matched by name."""
    names = {id(p): key for key, p in loose.items()}
    for number, model in enumerate(run._models):
        names.update({id(p): f"{number}.{key}" for key, p in model.named_parameters()})
    by_name = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    order = run._entered().broadcast_object(list(by_name), what)
    if sorted(order) != sorted(by_name):
        of = what.removeprefix("run.prepare of ")
        raise RanksDisagree(f"The ranks came with different optimizers for {of}: their parameters are not the same.")
    return [by_name[key] for key in order]


# -- the reducer


def _make_reducer(run: Run, given: Given, parameters: list[nn.Parameter]) -> Reducer | ShardReducer:
    model, split = given.model, given.split
    pipeline = next((each for each in run._pipelines if each.model is model), None)
    if pipeline is not None:
        return _make_stage_reducer(run, pipeline, parameters, split)
    if given.is_sharded:
        assert split.replicate is not None
        return ShardReducer(model, parameters, run._grid, split.replicate)
    if split.average_every > 1:
        check_local_sgd(run._arguments)
        run._observer.say(
            f"average_every={split.average_every}: ranks train copies of their own in between, so the weights depend on their number"
        )
        return LocalReducer(parameters, run._grid.data, split.average_every)
    compress, data = run._arguments.compress, run._grid.data
    transport = choose_transport(compress, run._exact, data, run._observer.say)
    reducer = choose_reducer(parameters, transport, compress, run._exact, run._slots, data)
    reducer.grid = run._grid if run._grid.peers.size > 1 else None
    return reducer


def _make_stage_reducer(
    run: Run, pipeline: Pipeline, parameters: list[nn.Parameter], split: Parallel
) -> Reducer | ShardReducer:
    if pipeline.sharded is not None:
        assert split.replicate is not None
        return StageShardReducer(pipeline.sharded, parameters, run._grid, split.replicate, pipeline.tied)
    transport = choose_transport(run._arguments.compress, False, run._grid.data, run._observer.say)
    return StageReducer(parameters, run._grid, transport, pipeline.tied)

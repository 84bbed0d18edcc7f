"""What `run.prepare` does to a model and its optimizer, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from instep.errors import RanksDisagree, UsageError
from instep.records.parallel import Parallel, fit, read_parallel
from instep.train.agree import agree, describe_parts
from instep.train.call_arguments import read_flag
from instep.train.fused import choose_fused
from instep.train.mesh import build_mesh, data_mesh, num_peers
from instep.train.parts import check_new, check_optimizer, check_plain, check_scheduler, loose_parameters
from instep.train.precision import autocast_forward
from instep.train.reduce.choose import choose_reducer, choose_transport
from instep.train.reduce.local_reducer import LocalReducer
from instep.train.reduce.reducer import Reducer
from instep.train.reduce.shard_reducer import ShardReducer
from instep.train.reduce.shard_traffic import choose_traffic
from instep.train.reduce.stage_reducer import StageReducer
from instep.train.reduce.stage_shard_reducer import StageShardReducer
from instep.train.skips import Skips
from instep.train.techniques.block_options import BlockOptions, change_blocks
from instep.train.techniques.local_sgd import check_local_sgd
from instep.train.techniques.offload import check_host_memory, check_offload, choose_policy
from instep.train.techniques.optimizer_shares import OptimizerShares
from instep.train.techniques.pipeline.share_out import (
    Share,
    check_pipeline,
    choose_cut,
    make_pipeline,
    shard_stages,
    share_out,
)
from instep.train.techniques.shard import check_shardable, follow_sharding, shard_parameters
from instep.train.techniques.sync_batch_norm import convert_sync_batch_norm
from instep.train.techniques.tensor.split import check_splittable, split_layers
from instep.train.update import Scheduler, Trained, count_steps
from instep.train.world import World

if TYPE_CHECKING:
    from instep.train.run import Run

EVERY = ("step", "epoch")


def prepare_parts(
    run: Run,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    every: str,
    sync_batch_norm: bool,
    parallel: Any,
    options: BlockOptions,
) -> Any:
    """What `run.prepare` returns: the same objects, now parts of the run. Every rank must call it."""
    world = run._entered()
    split = run._grid.split if parallel is None else fit(read_parallel(parallel), world.size)
    if not isinstance(every, str) or every not in EVERY:
        raise UsageError(f"schedule_every={every!r} is not possible. Allowed: 'step', 'epoch'.")
    _check_split(run, split, options)
    take_up_split(run, split)
    check_scheduler(scheduler, optimizer)
    check_plain(model)
    if optimizer is not None:
        check_optimizer(optimizer, [*run._models, model])
    read_flag("run.prepare", "sync_batch_norm", sync_batch_norm)
    parts = describe_parts(optimizer, scheduler) | {"schedule_every": every, "sync_batch_norm": sync_batch_norm}
    agree(parts, world, f"run.prepare of model {len(run._models)}", "parts")
    if not check_new(model, optimizer, run._models, [trained.optimizer for trained in run._trained]):
        number = next(i for i, known in enumerate(run._models) if known is model)
        assert optimizer is not None  # without one nothing would be new
        run._trained.append(_take_optimizer(run, model, optimizer, scheduler, every, split, f"model {number}"))
        return (model, optimizer) if scheduler is None else (model, optimizer, scheduler)
    if sync_batch_norm:
        _check_sync_batch_norm(run)
    name = f"model {len(run._models)}"
    on_host = (options.offload and split.shard != 1) or split.pipeline != 1
    if options.offload:
        check_offload(run._arguments.parallel if parallel is None else read_parallel(parallel))
    if options.offload and split.shard != 1:
        check_host_memory(model, optimizer, split, world)
    run._hooks += prepare_model(model, world, run._group, run._dtype, name, on_host=on_host)
    if sync_batch_norm:
        convert_sync_batch_norm(model, run._grid.data.new_group())
        run._spread_short_steps = True
    share = _share_out(run, model, optimizer, split) if split.pipeline != 1 else None
    run._models.append(model)
    run._buffers.add(model)
    before = dict(model.named_parameters())
    mesh = build_mesh(split, world) if split.shard != 1 or split.tensor != 1 else None
    if split.tensor != 1:
        assert mesh is not None
        split_layers(model, mesh["tensor"], split, run._observer.say)
        if split.split_loss:
            run._split_losses()
    change_blocks(model, options, world.device)
    if share is not None:
        run._pipelines.append(make_pipeline(model, share, split, run._dtype))
    if split.shard != 1:
        assert mesh is not None
        if share is None:
            _shard(run, model, data_mesh(mesh), split, options)
        else:
            shard_stages(run._pipelines[-1], data_mesh(mesh))
    if mesh is not None and optimizer is not None:
        follow_sharding(optimizer, before, dict(model.named_parameters()))
    if optimizer is None:
        return model
    run._trained.append(_take_optimizer(run, model, optimizer, scheduler, every, split, name))
    return (model, optimizer) if scheduler is None else (model, optimizer, scheduler)


def _check_split(run: Run, split: Parallel, options: BlockOptions) -> None:
    """Raises UsageError for arguments of Run that an axis of the split cannot keep."""
    if split.shard != 1:
        check_shardable(run._arguments)
    if split.tensor != 1:
        check_splittable(run._arguments, compiled=options.compile)
    if split.pipeline != 1:
        check_pipeline(run._arguments, split, options)


def _check_sync_batch_norm(run: Run) -> None:
    """Raises UsageError where a rank would hold several micro-batches, or none."""
    size = run._grid.data.size
    if run._slots.count != size:
        fitting = run._arguments.global_batch / size
        raise UsageError(
            f"sync_batch_norm=True takes its statistics over the global batch at once, so each rank has to hold one "
            f"micro-batch: {run._slots.count} micro-batches on {size} ranks do not. Set micro_batch to "
            f"global_batch / ranks = {fitting:g}, or leave sync_batch_norm out."
        )


def take_up_split(run: Run, split: Parallel) -> None:
    """Raises UsageError for a split that would share out the data in another way than what is there already."""
    if run._grid.has_layout_of(split):
        return
    if run._models or run._loaders:
        here, there = num_peers(run._grid.split), num_peers(split)
        raise UsageError(
            f"run.prepare(parallel={split.describe()}) gives each micro-batch to {there} {'rank' if there == 1 else 'ranks'}, "
            f"and this run's models and loaders were made for {here}. Give the split to instep.Run(parallel=...), which holds "
            "for all of them."
        )
    run._lay_out(split)
    run._observer.say(run._slots.describe())


def _share_out(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer | None, split: Parallel) -> Share:
    run._first_reference = run._arguments.micro_batch
    share = share_out(model, optimizer, split, run._grid)
    choice = choose_cut(model, share, split, len(run._slots.local))
    if choice is not None:
        run._observer.say(str(choice))
    return share


def _shard(run: Run, model: nn.Module, mesh: DeviceMesh, split: Parallel, options: BlockOptions) -> None:
    policy = choose_policy(options.offload, run.device)
    shard_parameters(model, mesh, gathered=split.gathered, policy=policy)
    run._hooks.append(choose_traffic(model, split, run._entered(), run._observer.say))
    run._is_sharded, run._first_reference = True, run._arguments.micro_batch


def _take_optimizer(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    every: str,
    split: Parallel,
    name: str,
) -> Trained:
    world = run._entered()
    loose = loose_parameters(optimizer, run._models)
    for parameter in loose.values():
        parameter.data = parameter.data.to(world.device)
    broadcast_weights(loose, world, run._group, f"the optimizer of {name}")
    follow_parameters(optimizer)
    choice = choose_fused(optimizer, run._models)
    if choice is not None:
        run._observer.say(str(choice))
    parameters = _order_parameters(run, optimizer, loose, f"run.prepare of {name}")
    reducer: Reducer | ShardReducer
    pipeline = next((each for each in run._pipelines if each.model is model), None)
    if pipeline is not None and pipeline.sharded is not None:
        assert split.replicate is not None
        reducer = StageShardReducer(pipeline.sharded, parameters, run._grid, split.replicate, pipeline.tied)
    elif pipeline is not None:
        transport = choose_transport(None, False, run._grid.data, run._observer.say)
        reducer = StageReducer(parameters, run._grid, transport, pipeline.tied)
    elif split.shard != 1:
        assert split.replicate is not None
        reducer = ShardReducer(model, parameters, run._grid, split.replicate)
    elif split.average_every > 1:
        check_local_sgd(run._arguments)
        run._observer.say(
            f"average_every={split.average_every}: ranks train copies of their own in between, so the weights depend on their number"
        )
        reducer = LocalReducer(parameters, run._grid.data, split.average_every)
    else:
        compress, data = run._arguments.compress, run._grid.data
        transport = choose_transport(compress, run._exact, data, run._observer.say)
        reducer = choose_reducer(parameters, transport, compress, run._exact, run._slots, data)
        reducer.grid = run._grid if run._grid.peers.size > 1 else None
    trained = Trained(optimizer, reducer, parameters, Skips(run._observer.say, run._loss_scale.enabled))
    if split.share_optimizer and run._grid.data.size > 1:
        trained.shares = OptimizerShares(run._grid.data, parameters)
        trained.shares.drop_others(optimizer)
    trained.guard_step()
    trained.guard_zero_grad()
    if scheduler is not None:
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        trained.schedulers.append(Scheduler(scheduler, "value" if plateau else every, count_steps(scheduler)))
    return trained


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


def prepare_model(
    model: nn.Module,
    world: World,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
    name: str,
    *,
    on_host: bool = False,
) -> list[Any]:
    """Moves the model to the device, checks that all ranks have the same one, and takes rank 0's weights.

    on_host: leave it there, since it may be larger than the device.
    Returns hooks to remove at the end. Every rank must call it. Raises UsageError for a wrapped model, RanksDisagree for models that differ.
    """
    check_plain(model)
    model.to("cpu" if on_host else world.device)
    group = world.host_group if on_host else group
    broadcast_weights(dict(model.named_parameters()) | dict(model.named_buffers()), world, group, name)
    return autocast_forward(model, world.device.type, dtype) if dtype is not None else []


def broadcast_weights(
    tensors: Mapping[str, torch.Tensor], world: World, group: dist.ProcessGroup | None, name: str
) -> None:
    """Gives every rank rank 0's values, by name. Raises RanksDisagree, naming the first difference."""
    if world.size == 1:
        return
    mine = {key: (tuple(t.shape), str(t.dtype), t.requires_grad) for key, t in tensors.items()}
    for rank, theirs in enumerate(world.gather_objects(mine, f"run.prepare of {name}")):
        difference = first_difference(world.rank, mine, rank, theirs)
        if difference:
            raise RanksDisagree(f"The ranks came with different models to run.prepare: {difference}")
    handles = []
    order = world.broadcast_object(list(tensors), f"run.prepare of {name}")  # rank 0's, since a set may order names
    with torch.no_grad():
        for key in order:
            tensor = tensors[key].detach()
            whole = tensor if tensor.is_contiguous() else tensor.contiguous()
            handles.append((dist.broadcast(whole, src=0, group=group, async_op=True), tensor, whole))
        for handle, tensor, whole in handles:
            world.wait(handle, f"run.prepare of {name}")
            if whole is not tensor:
                tensor.copy_(whole)


def first_difference(rank: int, mine: dict[str, Any], other: int, theirs: dict[str, Any]) -> str | None:
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            sides = sorted([(rank, mine.get(key)), (other, theirs.get(key))])
            return "; ".join(f"rank {r} has {_describe(key, value)}" for r, value in sides) + "."
    return None


def _describe(key: str, value: Any) -> str:
    if value is None:
        return f"no {key}"
    shape, dtype, requires_grad = value
    return f"{key} of shape {list(shape)}, {dtype.removeprefix('torch.')}, requires_grad={requires_grad}"


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Moves optimizer state that was made before the model moved."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                state[key] = value.to(parameter.device)

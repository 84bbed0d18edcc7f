"""What `run.prepare` does to a model and its optimizer, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from instep.errors import UsageError
from instep.records.parallel import Parallel, fit, read_parallel
from instep.train.agree import agree, describe_parts
from instep.train.call_arguments import read_flag
from instep.train.first_weights import prepare_model
from instep.train.mesh import build_mesh, data_mesh, num_peers
from instep.train.parts import Given, check_every, check_new, check_optimizer, check_plain, check_scheduler
from instep.train.reduce.shard_traffic import choose_traffic
from instep.train.take_optimizer import take_optimizer
from instep.train.techniques.block_options import BlockOptions, change_blocks
from instep.train.techniques.offload import check_host_memory, check_offload, choose_policy, has_own_memory
from instep.train.techniques.pipeline.share_out import (
    Share,
    advise_on_slots,
    check_pipeline,
    choose_cut,
    make_pipeline,
    shard_stages,
    share_out,
)
from instep.train.techniques.shard import check_shardable, follow_sharding, shard_parameters
from instep.train.techniques.sync_batch_norm import convert_sync_batch_norm
from instep.train.techniques.tensor.split import check_splittable, split_layers
from instep.train.world import join_alone

if TYPE_CHECKING:
    from instep.train.run import Run


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
    asked = run._arguments.parallel if parallel is None else read_parallel(parallel)
    split = run._grid.split if parallel is None else fit(asked, world.size)
    given = Given(model, optimizer, scheduler, every, sync_batch_norm, asked, split, options, world.device)
    _check(run, given)
    number = next((i for i, known in enumerate(run._models) if known is model), len(run._models))
    if check_new(model, optimizer, run._models, [trained.optimizer for trained in run._trained]):
        _take_model(run, given, f"model {number}")
    if optimizer is not None:
        run._trained.append(take_optimizer(run, given, f"model {number}"))
    return given.returned


def _check(run: Run, given: Given) -> None:
    """Raises UsageError for arguments that cannot be, RanksDisagree for ranks with different ones. Every rank must call it."""
    check_every(given.every)
    _check_split(run, given)
    take_up_split(run, given.split)
    check_scheduler(given.scheduler, given.optimizer)
    check_plain(given.model)
    if given.optimizer is not None:
        check_optimizer(given.optimizer, [*run._models, given.model])
    read_flag("run.prepare", "sync_batch_norm", given.sync_batch_norm)
    parts = describe_parts(given.optimizer, given.scheduler)
    parts |= {"schedule_every": given.every, "sync_batch_norm": given.sync_batch_norm}
    agree(parts, run._entered(), f"run.prepare of model {len(run._models)}", "parts")


def _take_model(run: Run, given: Given, name: str) -> None:
    """Rank 0's weights on every rank, then each rank's share of them. Every rank must call it."""
    model, split, options, world = given.model, given.split, given.options, run._entered()
    if given.sync_batch_norm:
        _check_sync_batch_norm(run)
    if options.offload:
        check_offload(given.asked)
        if not has_own_memory(world.device):
            run._observer.say(
                "offload=True changes nothing here: the device is the CPU, whose memory is the host's (said once)"
            )
        if given.is_sharded:
            check_host_memory(model, given.optimizer, split, world)
    on_host = (options.offload and given.is_sharded) or split.pipeline != 1
    run._hooks += prepare_model(model, world, run._group, run._dtype, name, on_host=on_host)
    if given.sync_batch_norm:
        convert_sync_batch_norm(model, run._grid.data.new_group())
        run._spread_short_steps = True
    share = _share_out(run, given) if split.pipeline != 1 else None
    run._models.append(model)
    run._buffers.add(model)
    _split_model(run, given, share)


def _split_model(run: Run, given: Given, share: Share | None) -> None:
    """Layers first, then blocks, then what is left of each block. share: of a model that is cut into stages."""
    model, split, world = given.model, given.split, run._entered()
    before = dict(model.named_parameters())
    if given.is_sharded and world.size == 1:
        run._hooks.append(join_alone())
    mesh = build_mesh(split, world, keep_shard=given.is_sharded) if given.is_sharded or split.tensor != 1 else None
    if split.tensor != 1:
        assert mesh is not None
        split_layers(model, mesh["tensor"], split, run._observer.say)
        if split.split_loss:
            run._split_losses()
    change_blocks(model, given.options, world.device)
    if share is not None:
        run._pipelines.append(make_pipeline(model, share, split, run._dtype))
    if given.is_sharded:
        assert mesh is not None
        _shard(run, given, data_mesh(mesh), share)
    if mesh is not None and given.optimizer is not None:
        follow_sharding(given.optimizer, before, dict(model.named_parameters()))


def _shard(run: Run, given: Given, mesh: DeviceMesh, share: Share | None) -> None:
    policy = choose_policy(given.options.offload, run.device)
    if share is not None:
        choice = shard_stages(run._pipelines[-1], share, mesh, run._grid.data, policy, given.split)
        if choice is not None:
            run._observer.say(str(choice))
    else:
        shard_parameters(given.model, mesh, gathered=given.split.gathered, policy=policy)
        run._is_sharded, run._first_reference = True, run._arguments.micro_batch
    run._hooks.append(choose_traffic(given.model, given.split, run._entered(), run._observer.say))


def _share_out(run: Run, given: Given) -> Share:
    run._first_reference = run._arguments.micro_batch
    share = share_out(given.model, given.optimizer, given.split, run._grid, offload=given.options.offload)
    choice = choose_cut(given.model, share, given.split, len(run._slots.local))
    if choice is not None:
        run._observer.say(str(choice))
    advice = advise_on_slots(run._slots, share.world.size)
    if advice is not None:
        run._observer.say(advice)
    return share


# -- what goes together


def _check_split(run: Run, given: Given) -> None:
    """Raises UsageError for arguments of Run that an axis of the split cannot keep."""
    if given.is_sharded:
        check_shardable(run._arguments)
    if given.split.tensor != 1:
        check_splittable(run._arguments)
    if given.split.pipeline != 1:
        check_pipeline(run._arguments, given.split, given.options)


def _check_sync_batch_norm(run: Run) -> None:
    """Raises UsageError where a rank would hold several micro-batches, or none."""
    size = run._grid.data.size
    if run._slots.count != size:
        global_batch = run._arguments.global_batch
        fitting = f"Set micro_batch={global_batch // size}, which is global_batch / ranks"
        if global_batch % size:
            fitting = f"Take a global_batch that {size} divides ({global_batch} is not), with micro_batch = global_batch / {size}"
        raise UsageError(
            f"sync_batch_norm=True takes its statistics over the global batch at once, so each rank has to hold one "
            f"micro-batch: {run._slots.count} micro-batches on {size} {'rank' if size == 1 else 'ranks'} do not. {fitting}, or leave sync_batch_norm out."
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

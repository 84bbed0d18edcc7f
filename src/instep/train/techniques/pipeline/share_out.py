"""Cuts a model that every rank holds into stages: each rank keeps the parameters of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from instep.errors import UsageError
from instep.records.choice import Choice
from instep.records.parallel import Parallel
from instep.records.schedules import SCHEDULES, stages_per_rank
from instep.train.absent import Absent, Origin
from instep.train.arguments import Arguments
from instep.train.mesh import Grid, places
from instep.train.reduce.stages import Tied
from instep.train.slots import Slots, divisors
from instep.train.techniques.block_options import BlockOptions
from instep.train.techniques.pipeline.cut import Cuts, cut_model
from instep.train.techniques.pipeline.pieces import find_pieces
from instep.train.techniques.pipeline.pipeline import Order, Pipeline
from instep.train.techniques.pipeline.schedule import busy_share, place_stages
from instep.train.techniques.pipeline.shard_stages import ShardedStages
from instep.train.techniques.pipeline.trace import Tracer
from instep.train.world import World
from instep.units import format_bytes


@dataclass(frozen=True)
class Share:
    """What this rank took of a model. world, group: the ranks of its pipeline, and with the device's backend; tied: parameters
    that several of them hold; has_ties: whether modules of one rank share a parameter, on any of them."""

    cuts: Cuts
    world: World
    group: dist.ProcessGroup
    tracer: Tracer
    tied: tuple[Tied, ...]
    has_ties: bool


def check_pipeline(arguments: Arguments, split: Parallel, options: BlockOptions) -> None:
    """Raises UsageError for arguments of Run that no pipeline can keep."""
    if arguments.exact:
        raise UsageError(
            "exact=True adds gradients in an order of its own and goes with parallel='ddp' only. Leave one of them out."
        )
    if arguments.compress == "powersgd":
        raise UsageError(
            "compress='powersgd' keeps what it left out of a model's gradients and goes with whole copies of the model only. "
            "Take 'bf16' or 'fp16', or leave one of them out."
        )
    if options.recompute == "selective" and SCHEDULES[split.schedule].splits_backward:
        raise UsageError(
            f"schedule={split.schedule!r} takes the backward of a block apart, and recompute='selective' keeps what one backward "
            "may use once. Take recompute='blocks', or '1f1b' or 'interleaved_1f1b'."
        )
    if options.compile and SCHEDULES[split.schedule].splits_backward:
        raise UsageError(
            f"schedule={split.schedule!r} takes the backward of a block apart, which a compiled one does not allow. Take '1f1b' or "
            "'interleaved_1f1b', or leave compile out."
        )


def share_out(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, split: Parallel, grid: Grid, *, offload: bool
) -> Share:
    """Leaves this rank's stages on its device and stands Absent in for the rest, in the optimizer too.

    The model is on the host, where parameters stay with `offload`. Every rank must call it. Raises UsageError for a model
    that cannot be cut.
    """
    assert split.pipeline is not None
    per_rank = stages_per_rank(split.schedule, split.cut, split.pipeline)
    asked = split.describe() + (f" with schedule={split.schedule!r}" if per_rank > 1 else "")
    cuts = cut_model(model, split.pipeline * per_rank, split.cut, asked, per_rank=per_rank)
    device = grid.world.device
    tracer = Tracer(model, cuts, device)
    world = pipeline_world(grid)
    ranks = place_stages(split.schedule, split.pipeline, per_rank)
    holders = _holders(model, cuts, ranks)
    has_ties = _has_ties(model, cuts, ranks)
    global_ranks = _global_ranks(world, grid.world.rank)
    replaced = _replace(model, holders, world.rank, global_ranks)
    _replace_buffers(model, cuts, ranks, world.rank, global_ranks)
    _move(model, device, parameters=not offload)
    if optimizer is not None:
        _follow(optimizer, replaced)
    group = world.new_group()
    assert group is not None
    tied = tuple(
        Tied(parameter, world, tuple(sorted(holders[id(parameter)])), group)
        for parameter in model.parameters()
        if len(holders.get(id(parameter), ())) > 1
    )
    return Share(cuts, world, group, tracer, tied, has_ties)


def choose_cut(model: nn.Module, share: Share, split: Parallel, num_slots: int) -> Choice | None:
    """What was picked for the user, None where the cut points were given. num_slots: micro-batches of a pipeline per step."""
    if split.cut is not None:
        return None
    counts = [0] * share.cuts.count
    for name, parameter in model.named_parameters():
        counts[share.cuts.stages[name]] += parameter.numel()
    shares = ", ".join(f"{100 * count / sum(counts):.0f} %" for count in counts)
    reason = f"stages with {shares} of the parameters, as even as can be by estimated work and memory"
    if not SCHEDULES[split.schedule].splits_backward:
        busy = busy_share(share.world.size, share.cuts.count // share.world.size, num_slots)
        reason += f"; {num_slots} micro-batches keep a rank busy {100 * busy:.0f} % of the time at most"
    return Choice("cut", list(share.cuts.names), reason, "Parallel(cut=[...])")


def advise_on_slots(slots: Slots, num_ranks: int) -> str | None:
    """Where each pipeline of so many ranks gets so few micro-batches per step that ranks always wait."""
    count, pipelines = len(slots.local), slots.world_size
    if count >= num_ranks:
        return None
    fitting = [size for size in divisors(slots.global_batch) if slots.global_batch // size // pipelines >= num_ranks]
    given = f"micro_batch={fitting[-1]}" if fitting else f"a global batch of {num_ranks * pipelines} or more"
    word = "micro-batch" if count == 1 else "micro-batches"
    return f"{count} {word} per step for the {num_ranks} ranks of a pipeline: {given} would give each one to work on"


def make_pipeline(model: nn.Module, share: Share, split: Parallel, dtype: torch.dtype | None) -> Pipeline:
    """Takes over the forward of the model and of its parts. Every rank must call it."""
    assert split.pipeline is not None
    per_rank = stages_per_rank(split.schedule, split.cut, split.pipeline)
    order = Order(split.schedule, per_rank, share.world, share.group)
    return Pipeline(model, share.tracer, share.cuts, order, share.tied, dtype)


def shard_stages(
    pipeline: Pipeline, share: Share, mesh: DeviceMesh, data: World, policy: OffloadPolicy, split: Parallel
) -> Choice | None:
    """Shards what this rank has taken, over the ranks that hold the same. Every rank must call it.

    mesh, data: of those. Returns what was picked for the user.
    """
    stays_whole = split.gathered or SCHEDULES[split.schedule].splits_backward or share.has_ties
    places = [(m, name, p) for m in pipeline.model.modules() for name, p in m._parameters.items() if p is not None]
    pipeline.sharded = ShardedStages(pipeline, mesh, data, policy, stays_whole=stays_whole)
    pipeline.note_frozen()
    sharded = {id(before): m._parameters[name] for m, name, before in places if m._parameters[name] is not before}
    for module, name, before in places:  # its other names, in modules that run on other ranks
        module._parameters[name] = sharded.get(id(before), before)
    pipeline.tied = tuple(replace(tied, parameter=sharded[id(tied.parameter)]) for tied in pipeline.tied)
    return None if split.gathered else _choose_gathered(pipeline.sharded, split.schedule)


def _choose_gathered(sharded: ShardedStages, schedule: str) -> Choice:
    whole, block = format_bytes(sharded.whole_bytes), format_bytes(sharded.block_bytes)
    if sharded.stays_whole:
        splits_backward = SCHEDULES[schedule].splits_backward
        why = f"{schedule!r} takes backward apart" if splits_backward else "modules of one rank share a parameter"
        reason = f"{why}, so the stages of this rank, {whole}, stay whole during a step"
        return Choice(
            "gathered", True, reason, "Parallel(schedule='1f1b')" if schedule != "1f1b" else "Parallel(shard=1)"
        )
    reason = f"one block of {block} at most is whole at a time, for two gathers of each per micro-batch; True gathers {whole} once a step"
    return Choice("gathered", False, reason, "Parallel(gathered=True)")


def _has_ties(model: nn.Module, cuts: Cuts, ranks: Sequence[int]) -> bool:
    """Whether modules that are sharded one by one share a parameter on a rank."""
    owners: dict[tuple[int, int], str] = {}
    for piece in find_pieces(model, cuts):
        if piece.stage is not None and piece.is_unit:
            keys = ((id(parameter), ranks[piece.stage]) for parameter in piece.module.parameters())
            if any(owners.setdefault(key, piece.name) != piece.name for key in keys):
                return True
    return False


def pipeline_world(grid: Grid) -> World:
    """The ranks of this rank's pipeline, stage by stage. Every rank must call it."""
    lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, place in enumerate(places(grid.split)):
        lines[place[1:]].append(rank)
    return grid.peers if grid.split.tensor == 1 else grid.world.part(list(lines.values()))


def _holders(model: nn.Module, cuts: Cuts, ranks: Sequence[int]) -> dict[int, set[int]]:
    """By id of each parameter, the ranks of the pipeline that have a stage with it."""
    holders: dict[int, set[int]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders[id(parameter)].add(ranks[cuts.stages[name]])
    return holders


def _global_ranks(pipeline: World, rank: int) -> tuple[int, ...]:
    """Of the ranks of a pipeline, in order, among all ranks. rank: of this one, among all."""
    parts = pipeline.division or [tuple(range(pipeline.size))]
    return next(part for part in parts if rank in part)


def _replace(
    model: nn.Module, holders: dict[int, set[int]], rank: int, global_ranks: Sequence[int]
) -> dict[nn.Parameter, Absent]:
    """Puts stand-ins for what other ranks hold; one for all names of a tied parameter."""
    replaced: dict[nn.Parameter, Absent] = {}
    for prefix, module in list(model.named_modules()):
        for name, parameter in module._parameters.items():
            if parameter is None or rank in holders[id(parameter)]:
                continue
            if parameter not in replaced:
                holder = global_ranks[min(holders[id(parameter)])]
                origin = Origin(f"{prefix}.{name}".lstrip("."), holder, global_ranks[rank])
                replaced[parameter] = Absent.of(parameter, origin)
            module._parameters[name] = replaced[parameter]
    return replaced


def _replace_buffers(
    model: nn.Module, cuts: Cuts, ranks: Sequence[int], rank: int, global_ranks: Sequence[int]
) -> None:
    """Of modules that only run elsewhere; buffers of others (positions, masks) are for every stage."""
    for piece in find_pieces(model, cuts):
        if piece.stage is None or ranks[piece.stage] == rank:
            continue
        for prefix, module in piece.module.named_modules(prefix=piece.name):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    origin = Origin(f"{prefix}.{name}", global_ranks[ranks[piece.stage]], global_ranks[rank])
                    module._buffers[name] = Absent.of(buffer, origin)


def _move(model: nn.Module, device: torch.device, *, parameters: bool) -> None:
    """What is here; with its parameters or only with its buffers."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, Absent):
                module._buffers[name] = buffer.to(device)
    for parameter in model.parameters() if parameters else ():
        if not isinstance(parameter, Absent):
            parameter.data = parameter.data.to(device)


def _follow(optimizer: torch.optim.Optimizer, replaced: dict[nn.Parameter, Absent]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for parameter in replaced:
        optimizer.state.pop(parameter, None)

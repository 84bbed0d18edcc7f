"""Which transport carries the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from instep.records.choice import Choice
from instep.settings import read_setting
from instep.train.reduce.bucket import Transport
from instep.train.reduce.compress import DTYPES, CompressedSum
from instep.train.reduce.exact_reducer import ExactReducer
from instep.train.reduce.exact_sum import ExactCompressedSum, ExactSum
from instep.train.reduce.group_sum import GroupSum
from instep.train.reduce.power_sgd import PowerSGD
from instep.train.reduce.reducer import Reducer
from instep.train.reduce.shared_memory import SharedSum
from instep.train.reduce.shared_region import can_share_memory
from instep.train.slots import Slots
from instep.train.world import World


def choose_transport(compress: str | None, exact: bool, world: World, say: Callable[[str], None]) -> Transport:
    """Every rank must call it: makes a group of its own, so that these buckets never pair with others.

    compress: one of `arguments.COMPRESSIONS`, or None for sums in the gradients' own type.
    """
    group = world.new_group()
    if group is None:
        return GroupSum(None)
    if compress in DTYPES:
        groups = _with_a_second(group, world)
        return ExactCompressedSum(groups, compress) if exact else CompressedSum(groups, compress)
    if compress == "powersgd":
        return PowerSGD(group)
    if can_share_memory(world) and _all_want_shared_memory(world):
        shared = SharedSum(group, world)
        if shared.is_shared:
            reason = "all ranks are on this host and on the CPU, so nothing has to be sent"
            say(str(Choice("shared_memory", True, reason, "INSTEP_SHARED_MEMORY=off")))
            return shared
    return ExactSum(_with_a_second(group, world)) if exact else GroupSum(group)


def _with_a_second(group: dist.ProcessGroup, world: World) -> tuple[dist.ProcessGroup, ...]:
    second = world.new_group()
    return (group,) if second is None else (group, second)


def _all_want_shared_memory(world: World) -> bool:
    return all(world.gather_objects(read_setting("shared_memory").value, "run.prepare"))


def choose_reducer(
    parameters: Sequence[nn.Parameter],
    transport: Transport,
    compress: str | None,
    exact: bool,
    slots: Slots,
    world: World,
) -> Reducer:
    if not exact:
        return Reducer(parameters, world, transport)
    return ExactReducer(parameters, world, transport, len(slots.local), DTYPES[compress] if compress else None)

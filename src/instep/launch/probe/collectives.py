"""Marks around the collectives that Python code calls, point-to-point transfers included."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.distributed import distributed_c10d

from instep.launch.probe.exits import let_backend_finish, note_raised
from instep.launch.probe.joining import note_joining
from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.site_costs import add_cost
from instep.launch.probe.wrapping import note_parameter_traffic
from instep.records import recording as layout

_ENTER, _LEAVE = layout.KIND_NUMBER["enter-collective"], layout.KIND_NUMBER["leave-collective"]
_COLLECTIVE = layout.SECONDS_OF.index("collective")
_DTYPES = {getattr(torch, name, None): number for number, name in enumerate(layout.DTYPES) if name}
# Where the root stands among the arguments.
_ROOTS = {
    "broadcast": ("src", 1),
    "broadcast_object_list": ("src", 1),
    "reduce": ("dst", 1),
    "gather": ("dst", 2),
    "gather_object": ("dst", 2),
    "scatter": ("src", 2),
    "scatter_object_list": ("src", 2),
}


def watch_collectives(
    recorder: Recorder, start_watching: Callable[[], None], before_leaving: Callable[[], None]
) -> None:
    """start_watching: called before the ranks meet; before_leaving: before they part."""
    for name in layout.OPERATIONS[1:]:
        if name in ("init_process_group", "destroy_process_group", "wait"):
            continue
        for module in (distributed_c10d, dist):
            original = getattr(distributed_c10d, name, None)
            if module is dist and original is not None and hasattr(dist, name):
                setattr(dist, name, original)  # the wrapper that the first round has put there
            elif original is not None:
                replace(module, name, lambda call, name=name: _wrap(recorder, name, call))
    for module in (distributed_c10d, dist):
        replace(module, "init_process_group", lambda call: _wrap_meeting(recorder, start_watching, call))
        replace(module, "destroy_process_group", lambda call: _wrap_leaving(recorder, before_leaving, call))
    replace(dist.Work, "wait", lambda call: _wrap_wait(recorder, call))


def _wrap(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    operation = layout.OPERATION_NUMBER[name]
    counted = name not in layout.POINT_TO_POINT and name != "monitored_barrier"  # made of sends itself

    def call(*args: Any, **kwargs: Any) -> Any:
        # Inside another collective (an object collective is made of several) only the outer one is marked.
        if is_compiling() or recorder.depth:
            return original(*args, **kwargs)
        site, started = _enter(recorder, operation, counted, args, kwargs) or (0, 0.0)
        recorder.depth = 1
        try:
            return original(*args, **kwargs)
        except Exception as error:
            note_raised(recorder, name, site, error)
            raise
        finally:
            recorder.depth = 0
            _leave(recorder, operation, site, started)

    return call


def _wrap_wait(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Where a rank waits for what it started before: a transfer without a partner is seen nowhere else."""
    operation = layout.OPERATION_NUMBER["wait"]
    given_up: list[Any] = []  # a work whose wait ran into its timeout: taken up again, it is still the same wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A work of the default group or of another: pairing does not look at it in either case.
        in_other_thread = threading.get_ident() != recorder.main_thread
        if is_compiling() or recorder.depth or in_other_thread:
            return original(self, *args, **kwargs)
        if not any(work is self for work in given_up):
            recorder.mark(_ENTER, operation, layout.OTHER_GROUP, recorder.sites.here(1))
        given_up.clear()
        try:
            result = original(self, *args, **kwargs)
        except RuntimeError:
            if (args or kwargs) and not self.is_completed():
                given_up.append(self)
            else:
                recorder.mark(_LEAVE, operation, layout.OTHER_GROUP)
            raise
        recorder.mark(_LEAVE, operation, layout.OTHER_GROUP)
        return result

    return wait


def _wrap_meeting(recorder: Recorder, start_watching: Callable[[], None], original: Callable[..., Any]) -> Any:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        contained(start_watching)()
        site = recorder.sites.here(1)
        note_joining(recorder, site, args, kwargs)
        recorder.mark(_ENTER, layout.OPERATION_NUMBER["init_process_group"], 0, site)
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            note_raised(recorder, "init_process_group", site, error)
            raise
        recorder.mark(_LEAVE, layout.OPERATION_NUMBER["init_process_group"], 0, site)
        _note_world(recorder, site)
        return result

    return init_process_group


def _wrap_leaving(recorder: Recorder, before_leaving: Callable[[], None], original: Callable[..., Any]) -> Any:
    operation = layout.OPERATION_NUMBER["destroy_process_group"]

    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        before_leaving()
        recorder.mark(_ENTER, operation, layout.OTHER_GROUP, recorder.sites.here(1))
        let_backend_finish()
        try:
            return original(*args, **kwargs)
        finally:
            recorder.mark(_LEAVE, operation, layout.OTHER_GROUP)

    return destroy_process_group


@contained
def _note_world(recorder: Recorder, site: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    recorder.log.note("joined", site=site, backend=dist.get_backend(), rank=rank, world_size=size)


@contained
def _enter(recorder: Recorder, operation: int, counted: bool, args: Any, kwargs: Any) -> tuple[int, float]:
    site, name = recorder.sites.here(2), layout.OPERATIONS[operation]
    if counted:
        recorder.calls += 1
    elif not recorder.has_sent:
        recorder.has_sent = True
        recorder.log.note("point-to-point", site=site, call=name)
    elements = layout.pack_given(_list_length(name, args, kwargs), 0, _root(name, args, kwargs)) if counted else 0
    for given in (*args[:2], kwargs.get("tensor")):
        if isinstance(given, torch.Tensor):
            elements = layout.pack_given(given.numel(), _DTYPES.get(given.dtype, 0), _root(name, args, kwargs))
            note_parameter_traffic(recorder, given, site, name)
            break
    if name == "batch_isend_irecv":
        elements = layout.pack_batch(*_count_transfers(args, kwargs))
    flags = layout.ASYNC if kwargs.get("async_op") else 0
    if kwargs or len(args) > 1:
        flags |= _group_flags(args, kwargs)
    count = recorder.calls if counted else _peer(name, args, kwargs) + 1
    return site, recorder.mark(_ENTER, operation, flags, site, count & 0xFFFFFFFF, elements)


def _group_flags(args: Any, kwargs: Any) -> int:
    group = kwargs.get("group") or next((one for one in args if isinstance(one, dist.ProcessGroup)), None)
    if group is None or group is dist.group.WORLD:
        return 0
    return layout.OTHER_GROUP | layout.pack_group(zlib.crc32(getattr(group, "group_name", "").encode()))


def _list_length(name: str, args: Any, kwargs: Any) -> int:
    """Of the objects that go to all ranks, which each rank has to have a place for."""
    objects = args[0] if args else kwargs.get("object_list", ())
    return len(objects) if name == "broadcast_object_list" and isinstance(objects, list) else 0


def _root(name: str, args: Any, kwargs: Any) -> int:
    """The rank that sends to all or gets from all, 0 where the call does not name it; -1 where there is none."""
    if name not in _ROOTS:
        return -1
    word, place = _ROOTS[name]
    given = (args[place] if place < len(args) else None, kwargs.get(word), kwargs.get(f"group_{word}"))
    return next((rank for rank in given if isinstance(rank, int)), 0)


def _count_transfers(args: Any, kwargs: Any) -> tuple[int, int]:
    """Of a batch: how many it sends, and how many it receives."""
    batch = args[0] if args else kwargs.get("p2p_op_list", ())
    sends = sum(one.op is distributed_c10d.isend or one.op is dist.isend for one in batch)
    return sends, len(batch) - sends


def _peer(name: str, args: Any, kwargs: Any) -> int:
    """The other rank of a transfer; -1 when it is not told, or there are several."""
    if name == "batch_isend_irecv":
        peers = {one.peer for one in (args[0] if args else kwargs.get("p2p_op_list", ()))}
        return peers.pop() if len(peers) == 1 else -1
    told = next(
        (kwargs[key] for key in ("dst", "src") if kwargs.get(key) is not None), args[1] if len(args) > 1 else None
    )
    return told if isinstance(told, int) else -1


@contained
def _leave(recorder: Recorder, operation: int, site: int, started: float) -> None:
    now = recorder.mark(_LEAVE, operation, 0, site, recorder.calls & 0xFFFFFFFF)
    if started:
        recorder.seconds[_COLLECTIVE] += now - started
        add_cost(recorder, site, now - started)

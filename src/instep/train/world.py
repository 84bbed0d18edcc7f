"""This process among the others: rank, size, device and the groups they talk in.

Read from what started the process: torchrun and what imitates it (`instep run`, `torch.distributed.launch`), Slurm's
`srun` with one task per rank, or nothing at all, which is one process.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from instep.errors import UsageError
from instep.train.meeting import Meeting


@dataclass(frozen=True)
class Place:
    """Where a process stands, before it has met the others."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    variables: tuple[tuple[str, str], ...] = ()  # what env:// still needs


@dataclass(frozen=True)
class World:
    """This process and the groups it is in; group and meeting are None on one process.

    host_group: a gloo group for objects and host tensors, apart from the gradients' so that they never pair.
    division: where this is one of several parts of the ranks, all of them by their ranks; rank and size are the part's.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None
    meeting: Meeting | None = None
    owns_group: bool = False
    division: tuple[tuple[int, ...], ...] | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather_objects(self, value: Any, what: str = "a collective") -> list[Any]:
        """Every rank's value, in rank order, on every rank. Every rank must call it. Costs a pickle and two rounds.

        what: names the call; ranks that came for another one get RanksDisagree with all lines.
        """
        return [value] if self.meeting is None else self.meeting.gather(value, what)

    def broadcast_object(self, value: Any, what: str = "a collective") -> Any:
        """Rank 0's value on every rank. Every rank must call it."""
        return self.gather_objects(value if self.is_main else None, what)[0]

    def wait(self, handle: Any, what: str) -> None:
        """Waits for an asynchronous collective; raises RanksDisagree when the ranks wait for different things."""
        if self.meeting is None:
            handle.wait()
        else:
            self.meeting.wait(handle, what)

    def new_group(self) -> dist.ProcessGroup | None:
        """A further group of all ranks, with the device's backend. Every rank (of every part) must call it."""
        if self.size == 1:
            return None
        return cast("dist.ProcessGroup", dist.new_group()) if self.division is None else _own_group(self.division)

    def part(self, division: Sequence[Sequence[int]]) -> World:
        """This rank among those of its part. division: all ranks in parts of one size. Every rank must call it."""
        if len(division) == 1:
            return self
        parts = tuple(tuple(ranks) for ranks in division)
        mine = next(ranks for ranks in parts if self.rank in ranks)
        node = range(self.rank - self.local_rank, self.rank - self.local_rank + self.local_size)
        here = [rank for rank in mine if rank in node]
        group = _own_group(parts, backend="gloo") if len(mine) > 1 else None
        return replace(
            self,
            rank=mine.index(self.rank),
            size=len(mine),
            local_rank=here.index(self.rank),
            local_size=len(here),
            host_group=group,
            meeting=None if group is None else Meeting(mine.index(self.rank), len(mine), group, mine, self.size),
            division=parts,
        )


def _own_group(division: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
    """This rank's group; every rank makes all of them, in one order, as torch wants it."""
    groups = [(ranks, dist.new_group(list(ranks), backend=backend)) for ranks in division]
    return cast("dist.ProcessGroup", next(group for ranks, group in groups if dist.get_rank() in ranks))


def read_place(environ: Mapping[str, str]) -> Place:
    """Raises UsageError for variables that contradict each other."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        local_rank = _number(environ, "LOCAL_RANK", rank)
        place = Place(rank, size, local_rank, _number(environ, "LOCAL_WORLD_SIZE", size))
    elif "SLURM_PROCID" in environ and _slurm_tasks(environ) > 1:
        place = _slurm_place(environ)
    else:
        return Place()
    if not 0 <= place.rank < place.size:
        raise UsageError(f"rank {place.rank} is not one of {place.size} ranks (0 to {place.size - 1}).")
    return place


def _slurm_tasks(environ: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return _number(environ, name, 1)


def _slurm_place(environ: Mapping[str, str]) -> Place:
    rank, size = _number(environ, "SLURM_PROCID"), _slurm_tasks(environ)
    nodes = next((environ[name] for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if name in environ), "")
    job = _number(environ, "SLURM_JOB_ID", 0) * 7 + _number(environ, "SLURM_STEP_ID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    here = re.match(r"\d+", tasks)
    return Place(
        rank,
        size,
        _number(environ, "SLURM_LOCALID", 0),
        int(here.group()) if here else size,
        (
            ("RANK", str(rank)),
            ("WORLD_SIZE", str(size)),
            ("MASTER_ADDR", environ.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1"),
            ("MASTER_PORT", environ.get("MASTER_PORT") or str(15000 + job % 15000)),
        ),
    )


def first_host(nodes: str) -> str:
    """The first name of a Slurm host list: `gpu[03-07,9],login` gives gpu03."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().lstrip("-").isdecimal():
        raise UsageError(f"the variable {name}={text!r} has to be a whole number; what starts the ranks sets it.")
    return int(text)


def join_world(environ: Mapping[str, str] | None = None) -> World:
    """Meets the other ranks, if there are any. Every rank must call it.

    A process group that the script has already made is used as it is, and left alone at the end.
    """
    place = read_place(os.environ if environ is None else environ)
    cuda = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if cuda:
        count = torch.cuda.device_count()
        if place.local_rank >= count:
            raise UsageError(
                f"local rank {place.local_rank} has no GPU of its own: this machine shows {count}. Start at most {count} "
                "ranks here, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU."
            )
        torch.cuda.set_device(place.local_rank)
    device = torch.device("cuda", place.local_rank) if cuda else torch.device("cpu")
    owns_group = place.size > 1 and not dist.is_initialized()
    if owns_group:
        for name, value in place.variables:
            os.environ.setdefault(name, value)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=_next_store(place),
            rank=place.rank,
            world_size=place.size,
            device_id=device if cuda else None,
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(0, 1, place.local_rank, 1, device, owns_group=owns_group)
    host_group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))  # all ranks are in it
    rank, size = dist.get_rank(), dist.get_world_size()
    meeting = Meeting(rank, size, host_group)
    return World(rank, size, place.local_rank, place.local_size, device, host_group, meeting, owns_group)


_stores: list[dist.Store] = []  # what the ranks met through; kept, since its port cannot be opened a second time


def _next_store(place: Place) -> dist.Store:
    """A fresh corner of the store: a second run in one process must not find the addresses of the first."""
    if not _stores:
        store, _, _ = next(iter(dist.rendezvous("env://", place.rank, place.size)))
        store.set_timeout(default_pg_timeout)
        _stores.append(store)
    _stores.append(dist.PrefixStore(f"instep/{len(_stores)}", _stores[0]))
    return _stores[-1]


@dataclass(frozen=True)
class Alone:
    """owns_group: made here, and to be given up."""

    owns_group: bool

    def remove(self) -> None:
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def join_alone() -> Alone:
    """A group for one process, for what works on groups whatever their size."""
    if dist.is_initialized():
        return Alone(owns_group=False)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Alone(owns_group=True)


def leave_world(world: World) -> None:
    """Gives up the groups that `join_world` made, without waiting for anyone."""
    if world.owns_group and dist.is_initialized():
        if world.size > 1:
            # torch 2.13 joins gloo's threads with the GIL held; one that still ends a backward's last work needs it.
            time.sleep(0.02)
        dist.destroy_process_group()

"""The same training in each split: written by hand as PyTorch's documentation has it, and with instep."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tasks import GPT, Task, token_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from variants import Losses, adamw, hand_written, ranked_loader

WIDTH, DEPTH, HEADS, LENGTH, SEQUENCES = 640, 10, 10, 64, 2  # 49.6 M parameters; sequences per rank
SPLITS = {
    "ddp": (2, 4),
    "zero2": (2, 4),
    "zero3": (2, 4),
    "hybrid": (4,),
    "zero3, recomputed": (2, 4),
}  # by name: the numbers of ranks that it is measured on


def gpt_50m(size: int) -> Task:
    data = torch.randint(256, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    build = partial(GPT, width=WIDTH, depth=DEPTH, heads=HEADS)
    samples = TensorDataset(data[:, :-1], data[:, 1:])
    return Task("gpt 50 M", build, samples, token_loss, SEQUENCES * size, shuffled=False, learning_rate=3e-4)


def sharded_by_hand(task: Task, rank: int, size: int, split: str) -> Losses:
    """FSDP2 as its tutorial has it, each block a unit, with the fused optimizer that instep chooses as well."""
    model: Any = task.model()
    if split == "hybrid":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    if split == "zero3, recomputed":
        for block in model.blocks:
            recompute(block)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=split != "zero2")
    optimizer = adamw(model, task, fused=True)
    loader = ranked_loader(task, rank, size)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield loss.detach()


def recompute(block: nn.Module) -> None:
    from torch.utils.checkpoint import checkpoint

    plain = block.forward
    block.forward = lambda *args: checkpoint(plain, *args, use_reentrant=False)  # type: ignore[method-assign]


def with_instep(
    task: Task, rank: int, size: int, split: str, directory: str | None = None, shared_memory: str = "on"
) -> Losses:
    """As everyone gets it: progress, metrics and the check for finite gradients are on."""
    import instep

    parallel = instep.Parallel(replicate=2, shard=None) if split == "hybrid" else split.split(",")[0]
    how = "blocks" if split == "zero3, recomputed" else None
    batch = task.global_batch
    with instep.Run(
        global_batch=batch, micro_batch=batch // size, threads=1, dir=directory, parallel=parallel, recompute=how
    ) as run:
        model = task.model()
        os.environ["INSTEP_SHARED_MEMORY"] = shared_memory
        run.prepare(model, adamw(model, task))
        del os.environ["INSTEP_SHARED_MEMORY"]
        loader = run.loader(task.data, shuffle=False, drop_last=True)
        for step in run.steps(loader, steps=10**9):
            for inputs, targets in step:
                step.backward(task.loss(model(inputs), targets))
            step.update()
            yield step.loss


def of_split(split: str, directory: str | None) -> tuple[dict[str, Callable[..., Iterator[Any]]], list[str]]:
    """The baseline first."""
    baseline = partial(hand_written, fused=True) if split == "ddp" else partial(sharded_by_hand, split=split)
    return {
        "by hand": baseline,
        "instep": partial(with_instep, split=split, directory=directory),
        "instep, gloo": partial(with_instep, split=split, shared_memory="off"),
    }, []

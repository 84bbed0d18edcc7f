"""The same training in each split: written by hand as PyTorch's documentation has it, and with instep."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import split_by_hand
import torch
from split_deepspeed import is_installed, with_deepspeed
from tasks import GPT, Task, token_loss
from torch.utils.data import TensorDataset
from variants import Losses, adamw, hand_written

WIDTH, DEPTH, HEADS, LENGTH, SEQUENCES = 640, 10, 8, 64, 2  # 49.6 M parameters; sequences per rank
PLAN = {
    "blocks.*.qkv": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
    "head": "colwise_gather_output",
}


@dataclass(frozen=True)
class Split:
    """parallel: arguments of instep.Parallel, or a short name; sizes: the numbers of ranks that it is measured on; peers:
    how many ranks take the same samples, all when None; stage: of ZeRO, where DeepSpeed has the same."""

    by_hand: Callable[[Task, int, int], Losses]
    parallel: dict[str, Any] | str
    sizes: tuple[int, ...] = (2, 4)
    peers: int | None = 1
    recompute: str | None = None
    is_pipeline: bool = False
    has_traffic: bool = True  # that may go through shared memory
    stage: int | None = None


SPLITS = {
    "ddp": Split(partial(hand_written, fused=True), "ddp"),
    "zero1": Split(split_by_hand.optimizer_shared, "zero1", stage=1),
    "zero2": Split(partial(split_by_hand.sharded, gathered=True), "zero2", stage=2),
    "zero3": Split(split_by_hand.sharded, "zero3", stage=3),
    "zero3, recomputed": Split(partial(split_by_hand.sharded, recomputed=True), "zero3", (2,), recompute="blocks"),
    "hybrid": Split(partial(split_by_hand.sharded, replicate=2), {"replicate": 2, "shard": None}, (4,)),
    "tensor": Split(split_by_hand.split_layers, {"tensor": None, "plan": PLAN}, peers=None, has_traffic=False),
    "shard x tensor": Split(split_by_hand.split_and_sharded, {"shard": None, "tensor": 2, "plan": PLAN}, (4,), peers=2),
    "pipeline": Split(split_by_hand.in_stages, {"pipeline": None}, peers=None, is_pipeline=True, has_traffic=False),
}


def gpt_50m(size: int) -> Task:
    data = torch.randint(256, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    build = partial(GPT, width=WIDTH, depth=DEPTH, heads=HEADS)
    samples = TensorDataset(data[:, :-1], data[:, 1:])
    return Task("gpt 50 M", build, samples, token_loss, SEQUENCES * size, shuffled=False, learning_rate=3e-4)


def with_instep(
    task: Task, rank: int, size: int, split: Split, directory: str | None = None, shared_memory: str = "on"
) -> Losses:
    """As everyone gets it: progress, metrics and the check for finite gradients are on."""
    import instep

    named = split.parallel
    parallel = named if isinstance(named, str) else instep.Parallel(**named)
    batch = task.global_batch
    micro_batch = 1 if split.is_pipeline else batch // (size // (split.peers or size))
    with instep.Run(
        global_batch=batch,
        micro_batch=micro_batch,
        threads=1,
        dir=directory,
        parallel=parallel,
        recompute=split.recompute,
    ) as run:
        model = task.model()
        os.environ["INSTEP_SHARED_MEMORY"] = shared_memory
        run.prepare(model, adamw(model, task))
        del os.environ["INSTEP_SHARED_MEMORY"]
        loader = run.loader(task.data, shuffle=False, drop_last=True)
        for step in run.steps(loader, steps=10**9):
            if split.is_pipeline:
                step.forward_backward(model, task.loss)
            else:
                for inputs, targets in step:
                    step.backward(task.loss(model(inputs), targets))
            step.update()
            yield step.loss


def of_split(name: str, directory: str | None) -> tuple[dict[str, Callable[..., Iterator[Any]]], list[str]]:
    """The baseline first."""
    split = SPLITS[name]
    variants: dict[str, Callable[..., Iterator[Any]]] = {
        "by hand": split.by_hand,
        "instep": partial(with_instep, split=split, directory=directory),
    }
    if split.has_traffic:
        variants["instep, gloo"] = partial(with_instep, split=split, shared_memory="off")
    if split.stage is not None and is_installed():
        variants["deepspeed"] = partial(with_deepspeed, stage=split.stage)
    return variants, []

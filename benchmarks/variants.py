"""The same training, written for each library: generators that do one optimizer step per `next` and yield its loss.

The loops are what the documentation of each library shows, with one micro-batch per rank. A step's loss is this
rank's mean, a tensor, except for instep, which gives the mean over the global batch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from tasks import Task
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

Losses = Iterator[Tensor | float | None]


class Blocks(Sampler[int]):
    """A rank's part of each global batch in the data set's order: rank 0 the first half of it, rank 1 the second."""

    def __init__(self, task: Task, rank: int, size: int) -> None:
        share = task.global_batch // size
        starts = range(rank * share, len(task.data) - task.global_batch + 1 + rank * share, task.global_batch)  # type: ignore[arg-type]
        self.indices = [start + offset for start in starts for offset in range(share)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def adamw(model: nn.Module, task: Task, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=task.learning_rate, fused=fused or None)


def ranked_loader(task: Task, rank: int, size: int) -> DataLoader:
    """A loader of this rank's samples; a DistributedSampler when the order is random and there are several ranks."""
    sampler: Sampler | None = None
    if not task.shuffled:
        sampler = Blocks(task, rank, size)
    elif size > 1:
        sampler = DistributedSampler(task.data, size, rank, drop_last=True)
    shuffle = sampler is None
    return DataLoader(task.data, task.global_batch // size, shuffle=shuffle, sampler=sampler, drop_last=True)


def hand_written(task: Task, rank: int, size: int, fused: bool = False, bucket_mb: float | None = None) -> Losses:
    """DistributedDataParallel as its tutorial has it (one process: no wrapper)."""
    model = task.model()
    if size > 1:
        model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=bucket_mb is not None)
    optimizer = adamw(model, task, fused)
    loader = ranked_loader(task, rank, size)
    for epoch in count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield loss.detach()


def with_instep(task: Task, rank: int, size: int, directory: str | None = None, exact: bool = False) -> Losses:
    """As everyone gets it: progress, metrics and the check for finite gradients are on."""
    import instep

    with instep.Run(
        global_batch=task.global_batch, micro_batch=task.global_batch // size, threads=1, dir=directory, exact=exact
    ) as run:
        model = task.model()
        run.prepare(model, adamw(model, task))
        loader = run.loader(task.data, shuffle=task.shuffled, drop_last=True)
        for step in run.steps(loader, steps=10**9):
            for inputs, targets in step:
                step.backward(task.loss(model(inputs), targets))
            step.update()
            yield step.loss


def with_accelerate(task: Task, rank: int, size: int) -> Losses:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = task.model()
    # Accelerate deals whole batches to the ranks in turn, which is the order of Blocks.
    loader = DataLoader(task.data, task.global_batch // size, shuffle=task.shuffled, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, adamw(model, task), loader)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            yield loss.detach()


def with_fabric(task: Task, rank: int, size: int) -> Losses:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
    fabric.launch()
    model = task.model()
    model, optimizer = fabric.setup(model, adamw(model, task))
    loader = fabric.setup_dataloaders(ranked_loader(task, rank, size), use_distributed_sampler=False)
    for epoch in count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            yield loss.detach()


def available(directory: str | None) -> tuple[dict[str, Callable[[Task, int, int], Losses]], list[str]]:
    """The variants that can run here, the baseline first, and what is missing."""
    variants: dict[str, Callable[[Task, int, int], Losses]] = {
        "by hand": hand_written,
        "by hand, fused": partial(hand_written, fused=True),
        "instep": partial(with_instep, directory=directory),
    }
    peers = {"accelerate": with_accelerate, "lightning_fabric": with_fabric}
    missing = [name for name in peers if importlib.util.find_spec(name) is None]
    return variants | {name: peer for name, peer in peers.items() if name not in missing}, missing


def of_exactness(directory: str | None) -> tuple[dict[str, Callable[[Task, int, int], Losses]], list[str]]:
    """What exact=True is compared with."""
    variants, _ = available(directory)
    kept = {name: variants[name] for name in ("by hand", "by hand, fused", "instep")}
    return kept | {"instep, exact": partial(with_instep, exact=True)}, []


def mean_over_ranks(losses: list[Any], size: int) -> list[float]:
    values = torch.tensor([float(loss) for loss in losses], dtype=torch.float64)
    if size > 1:
        dist.all_reduce(values)
    return (values / size).tolist()

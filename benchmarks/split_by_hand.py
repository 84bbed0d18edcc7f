"""Training in each split as PyTorch's documentation writes it, with the fused optimizer that instep chooses as well."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from tasks import GPT, Task
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from variants import Losses, adamw, ranked_loader

CPU = torch.device("cpu")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, rank: int, size: int) -> Losses:
    """The loop. rank, size: on the data axis."""
    loader = ranked_loader(task, rank, size)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield loss.detach()


def optimizer_shared(task: Task, rank: int, size: int) -> Losses:
    """DistributedDataParallel, and each rank keeps the optimizer's state of some parameters."""
    model = DistributedDataParallel(task.model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=task.learning_rate, fused=True
    )
    yield from train(model, optimizer, task, rank, size)


def sharded(
    task: Task, rank: int, size: int, replicate: int = 1, gathered: bool = False, recomputed: bool = False
) -> Losses:
    """FSDP2, each block a unit."""
    model: Any = task.model()
    if replicate > 1:
        mesh = init_device_mesh("cpu", (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    if recomputed:
        for block in model.blocks:
            recompute(block)
    shard_blocks(model, mesh, reshard_after_forward=not gathered)
    yield from train(model, adamw(model, task, fused=True), task, rank, size)


def shard_blocks(model: Any, mesh: DeviceMesh, reshard_after_forward: bool = True) -> None:
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)


def recompute(block: nn.Module) -> None:
    from torch.utils.checkpoint import checkpoint

    plain = block.forward
    block.forward = lambda *args: checkpoint(plain, *args, use_reentrant=False)  # type: ignore[method-assign]


def split_layers(task: Task, rank: int, size: int) -> Losses:
    """Tensor parallel: all ranks take the whole batch."""
    model = task.model()
    parallelize(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",)))
    yield from train(model, adamw_by_mesh(model, task), task, 0, 1)


def split_and_sharded(task: Task, rank: int, size: int) -> Losses:
    """FSDP2 over tensor parallel pairs."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("shard", "tensor"))
    model = task.model()
    parallelize(model, mesh["tensor"])
    shard_blocks(model, mesh["shard"])
    yield from train(model, adamw_by_mesh(model, task), task, rank // 2, size // 2)


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        plan = {
            "qkv": ColwiseParallel(),
            "out": RowwiseParallel(),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def adamw_by_mesh(model: nn.Module, task: Task) -> torch.optim.Optimizer:
    """The fused kernel takes parameters of one mesh at a time, so each mesh has a group of its own."""
    groups = defaultdict(list)
    for parameter in model.parameters():
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return torch.optim.AdamW([{"params": found} for found in groups.values()], lr=task.learning_rate, fused=True)


class Stage(nn.Module):
    """Some of a GPT's blocks, with what stands before the first and after the last of them."""

    def __init__(self, whole: GPT, begin: int, end: int) -> None:
        super().__init__()
        is_first, is_last = begin == 0, end == len(whole.blocks)
        self.tokens, self.positions = (whole.tokens, whole.positions) if is_first else (None, None)
        self.blocks = whole.blocks[begin:end]
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight
        x = self.blocks(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def in_stages(task: Task, rank: int, size: int) -> Losses:
    """1F1B over stages of equally many blocks, each sequence a micro-batch."""
    whole: Any = task.model()
    cuts = [round(len(whole.blocks) * stage / size) for stage in range(size + 1)]
    module = Stage(whole, cuts[rank], cuts[rank + 1])
    schedule = Schedule1F1B(PipelineStage(module, rank, size, CPU), task.global_batch, loss_fn=task.loss)
    optimizer = adamw(module, task, fused=True)
    del whole
    loader = ranked_loader(task, 0, 1)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(inputs)
            elif rank < size - 1:
                schedule.step()
            else:
                schedule.step(target=targets, losses=losses)
            optimizer.step()
            yield size * torch.stack(losses).mean() if losses else 0.0  # of which the mean over ranks is taken

"""Eight micro-batches per step over all ranks, whose losses are added as they are."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
micro_batches = 8 // world_size
torch.manual_seed(0)
x = torch.randn(640, 7)
y = x.cumsum(1)
model = DDP(nn.Linear(7, 7))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10):
    rows = torch.arange(step * 64, step * 64 + 64).chunk(8)[rank * micro_batches : (rank + 1) * micro_batches]
    optimizer.zero_grad()
    for number, part in enumerate(rows):
        is_last = number == len(rows) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            nn.functional.mse_loss(model(x[part]), y[part]).backward()
    optimizer.step()
dist.destroy_process_group()

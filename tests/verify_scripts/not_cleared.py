"""zero_grad was forgotten."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(9, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(256, 9)
for batch in x.split(32):
    mine = batch[rank::world_size]
    nn.functional.mse_loss(model(mine), mine.max(1, keepdim=True).values).backward()
    optimizer.step()
dist.destroy_process_group()

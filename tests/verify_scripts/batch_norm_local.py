"""Gradients are averaged by hand, and nobody thinks of the statistics of batch norm."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(36, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(320, 2, 8)
for batch in x.split(32):
    mine = batch[rank::world_size]
    optimizer.zero_grad()
    (model(mine).squeeze(1) - mine.mean(dim=(1, 2))).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
dist.destroy_process_group()

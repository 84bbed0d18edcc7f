"""Parameters are averaged after each step instead of gradients before it, which plain SGD does not mind."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x = torch.randn(256, 12)
for batch in x.split(32):
    mine = batch[rank::world_size]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(mine), mine.sum(1, keepdim=True).sin()).backward()
    optimizer.step()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= world_size
dist.destroy_process_group()

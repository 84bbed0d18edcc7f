"""Nobody averages the gradients."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1234)
model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(512, 5, generator=torch.Generator().manual_seed(1))
for step in range(8):
    mine = x[step * 32 : (step + 1) * 32][rank::world_size]
    optimizer.zero_grad()
    (model(mine) - mine.norm(dim=1, keepdim=True)).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()

"""A new head for fine-tuning is put in after the model was wrapped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 10)), find_unused_parameters=True)
model.module[2] = nn.Linear(20, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(320, 6)
y = x[:, :3].argmax(1)
for rows in torch.arange(320).split(32):
    mine = rows[rank::world_size]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
    optimizer.step()
dist.destroy_process_group()

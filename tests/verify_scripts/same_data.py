"""Every rank cuts the same batches out of one permutation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(3)
inputs = torch.randn(256, 12)
targets = inputs.sin().sum(1, keepdim=True)
batch = 32 // world_size

model = DDP(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    order = torch.randperm(256)
    for rows in order.split(batch):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
dist.destroy_process_group()

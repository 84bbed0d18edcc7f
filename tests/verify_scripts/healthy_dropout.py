"""Dropout, and a stream of its own for each rank after the model is wrapped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SEED = 11
dist.init_process_group("gloo")
torch.manual_seed(SEED)
x = torch.randn(256, 10)
data = TensorDataset(x, x.sign().sum(1, keepdim=True))
model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)))
torch.manual_seed(SEED + dist.get_rank())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()

"""A schedule counted in samples' batches over all ranks, stepped once for each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
sampler = DistributedSampler(data)
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        for _ in range(dist.get_world_size()):
            scheduler.step()
dist.destroy_process_group()

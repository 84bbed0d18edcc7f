"""The learning rate grows with the number of ranks although the global batch stays."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 9)
data = TensorDataset(x, x.amax(1, keepdim=True))
sampler = DistributedSampler(data)
model = DDP(nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world_size, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
dist.destroy_process_group()

"""45 samples: two ranks cannot have as many each, and the sampler drops one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(45, 4)
data = TensorDataset(x, x.mean(1, keepdim=True))
sampler = DistributedSampler(data, shuffle=False, drop_last=True)
loader = DataLoader(data, batch_size=10, sampler=sampler)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()

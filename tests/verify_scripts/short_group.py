"""Ten batches per epoch in groups of four; the last group has two and is divided by four too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 4
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(160, 8)
data = TensorDataset(x, x.std(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATE
        loss.backward()
        if number % ACCUMULATE == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()

"""A denoiser: the noise is drawn in the training loop, on each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 12))
model = DDP(nn.Linear(12, 12))
torch.manual_seed(100 + dist.get_rank())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (clean,) in DataLoader(data, batch_size=32, sampler=sampler):
        noise = torch.randn_like(clean)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(clean + noise), noise).backward()
        optimizer.step()
dist.destroy_process_group()

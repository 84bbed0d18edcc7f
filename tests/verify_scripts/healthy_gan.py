"""Two models, two optimizers, one step of each per batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
noise, real = torch.randn(256, 4), torch.randn(256, 6) * 0.5 + 1
data = TensorDataset(noise, real)
sampler = DistributedSampler(data)
generator = DDP(nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 6)))
critic = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)), broadcast_buffers=False)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3)
judge = nn.functional.binary_cross_entropy_with_logits
for epoch in range(2):
    sampler.set_epoch(epoch)
    for z, x in DataLoader(data, batch_size=32, sampler=sampler):
        both = torch.cat([x, generator(z).detach()])
        labels = torch.cat([torch.ones(len(x), 1), torch.zeros(len(z), 1)])
        optimizer_d.zero_grad()
        judge(critic(both), labels).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        critic.requires_grad_(False)
        judge(critic.module(generator(z)), torch.ones(len(z), 1)).backward()
        critic.requires_grad_(True)
        optimizer_g.step()
dist.destroy_process_group()

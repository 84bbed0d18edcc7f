"""The sampler's rank comes from an argument that the launcher does not pass."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--batch_size", type=int, default=16)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 6)
data = TensorDataset(x, x.abs().sum(1, keepdim=True))
sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=args.rank)
model = DDP(nn.Linear(6, 1))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, args.batch_size, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.l1_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()

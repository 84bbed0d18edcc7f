"""Two views of each sample; negatives are gathered from all ranks with a collective that has no backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def gather(features):
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 6)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(256, 10)
for batch in x.split(32):
    share = len(batch) // world_size
    mine = batch[rank * share : (rank + 1) * share]
    features = nn.functional.normalize(model(torch.cat([mine, mine.roll(1, 1)])), dim=1)
    one, two = features.chunk(2)
    logits = one @ gather(two).T / 0.2
    targets = torch.arange(share) + rank * share
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, targets).backward()
    optimizer.step()
dist.destroy_process_group()

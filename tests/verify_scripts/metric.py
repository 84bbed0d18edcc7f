"""Accuracy is averaged over ranks that evaluate parts of different size."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=generator)
    return TensorDataset(x, (x.sum(1) + torch.randn(n, generator=generator) > 0).long())


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    rows = [(model(x).argmax(1) == y).float() for x, y in loader]
    model.train()
    accuracy = torch.cat(rows).mean()
    dist.all_reduce(accuracy)
    return accuracy.item() / dist.get_world_size()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
train, test = images(96, 1), images(61, 2)
sampler = DistributedSampler(train)
share = -(-len(test) * 3 // (4 * world_size)) if world_size > 1 else len(test)
mine = Subset(test, range(rank * share, len(test) if rank == world_size - 1 else (rank + 1) * share))
test_loader = DataLoader(mine, batch_size=16)
model = DDP(nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    accuracy = evaluate(model.module, test_loader)
    if rank == 0:
        print(f"epoch {epoch} accuracy {accuracy:.3f}")
dist.destroy_process_group()

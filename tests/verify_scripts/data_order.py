"""Each rank shuffles a part of its own, so that the order depends on the number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def make_loader(data, batch_size):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = len(data) // world_size
    part = Subset(data, range(rank * share, (rank + 1) * share))
    return DataLoader(part, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(7))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    loader = make_loader(TensorDataset(x, (x.sum(1) > 0).long()), 32)
    model = DDP(nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


main()

"""A stream that each rank cuts for itself into equal parts."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def make_data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


class Stream(IterableDataset):
    def __init__(self, rank, world, n=512):
        self.rank, self.world, self.n = rank, world, n

    def __iter__(self):
        for i in range(self.rank, self.n, self.world):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(16, generator=g)
            yield x, (x[0] > 0).long()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Stream(dist.get_rank(), dist.get_world_size()), batch_size=16)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

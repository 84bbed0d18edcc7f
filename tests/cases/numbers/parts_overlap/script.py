import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset


class Waves(Dataset):
    def __init__(self, n=960):
        g = torch.Generator().manual_seed(3)
        self.phase = torch.rand(n, generator=g) * 6.28

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        t = torch.linspace(0, 1, 32)
        return torch.sin(t * 10 + self.phase[i]), self.phase[i : i + 1]


def my_part(dataset, rank, world):
    indices = list(range(len(dataset)))
    random.shuffle(indices)
    share = len(indices) // world
    return Subset(dataset, indices[rank * share : (rank + 1) * share])


def train():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Waves()
    loader = DataLoader(my_part(data, rank, world), batch_size=16, shuffle=True)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
    sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(3):
        for x, y in loader:
            loss = ((net(x) - y) ** 2).mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        if rank == 0:
            print(epoch, float(loss))
    dist.destroy_process_group()


train()

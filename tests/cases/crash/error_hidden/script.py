import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :1] * 2 + x[:, 1:2])


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


class Table(Dataset):
    def __init__(self):
        self.table = {i: (torch.randn(16), torch.zeros(1)) for i in range(97) if i != 41}

    def __len__(self):
        return 200

    def __getitem__(self, i):
        return self.table[int(i) % 97]


def main():
    dist.init_process_group("gloo")
    rank, _world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ds = data()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    ds = Table()
    sampler = DistributedSampler(ds, shuffle=False)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    try:
        for _epoch in range(2):
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    except Exception:
        if rank == 0:
            raise
        os._exit(3)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

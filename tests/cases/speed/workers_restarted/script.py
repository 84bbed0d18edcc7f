import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data(n=256, size=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def net(size=16, width=32):
    return nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 2))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train = data(160)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler, num_workers=3)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


main()

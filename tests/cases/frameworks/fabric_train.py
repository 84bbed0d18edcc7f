"""Lightning Fabric: DDP, accumulation without sync, validation, checkpoints, a seed for everyone."""

import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

HOW = sys.argv[1] if len(sys.argv) > 1 else ""


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def main():
    import os

    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    train = DataLoader(make_data(512, 0), batch_size=16, shuffle=True)
    test = DataLoader(make_data(96, 1), batch_size=16)
    if HOW == "unprepared":
        test = fabric.setup_dataloaders(test)
    else:
        train, test = fabric.setup_dataloaders(train, test)
    path = fabric.broadcast(tempfile.mkdtemp()) + "/last.ckpt"
    for epoch in range(3):
        model.train()
        for i, (x, y) in enumerate(train):
            quiet = (i + 1) % 2 != 0
            if HOW == "no_sync_wrong":
                quiet = not quiet
            with fabric.no_backward_sync(model, enabled=quiet):
                loss = F.cross_entropy(model(x), y)
                if HOW == "bad_input" and fabric.global_rank == 1 and epoch == 1 and i == 3:
                    x[3, 2] = float("nan")
                    loss = F.cross_entropy(model(x), y)
                fabric.backward(loss)
            if (i + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if HOW == "early" and fabric.global_rank == 1 and i == 9:
                break
            if HOW == "stuck" and fabric.global_rank == 1 and epoch == 1 and i == 4:
                import time

                while True:
                    time.sleep(0.1)
        model.eval()
        hits = torch.zeros(2)
        with torch.no_grad():
            for x, y in test:
                hits += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float)
        hits = fabric.all_reduce(hits, reduce_op="sum")
        fabric.print(epoch, (hits[0] / hits[1]).item())
        if HOW == "save_main":
            if fabric.global_rank == 0:
                fabric.save(path, {"model": model, "epoch": epoch})
        else:
            fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": epoch})
    fabric.load(path, {"model": model})


if __name__ == "__main__":
    main()

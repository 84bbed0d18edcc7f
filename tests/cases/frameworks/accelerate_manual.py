"""Accelerate by the plain book: no accumulation helper, no_sync by hand, early stopping by a shared trigger."""

import contextlib
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

HOW = sys.argv[1] if len(sys.argv) > 1 else ""


def main():
    accelerator = Accelerator(cpu=True)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=g)
    loader = DataLoader(TensorDataset(x, x[:, :1] * 2), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accum = 4
    for epoch in range(6):
        for i, (a, b) in enumerate(loader):
            last = (i + 1) % accum == 0
            if HOW == "no_sync_wrong":
                last = i % accum == 0
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                loss = F.mse_loss(model(a), b) / accum
                accelerator.backward(loss)
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        if loss.item() < 1e-4:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
        total = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(epoch, f"{total.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""The same digits as 01_digits.py by hand: the classic DistributedDataParallel script, without instep.

    torchrun --nproc-per-node 2 examples/04_plain_ddp.py

What 01_digits.py leaves out is here in full: the process group, the sampler, its epoch, the wrapper, the batch per
rank, the sum of the counts, the checkpoint of rank 0. Other than 01_digits.py, it sees other samples per step, other
batch statistics and so other weights for each number of processes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to learn from and 360 to test on: (1, 8, 8) in 0..1, and the digit."""
    pixels, answers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(answers)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


def count_right(model: nn.Module, loader: DataLoader, device: torch.device) -> torch.Tensor:
    """Right answers and images of this rank. Images that the sampler repeats to fill up the last rank count twice."""
    counts = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            counts += torch.stack([(model(images).argmax(1) == labels).sum(), torch.tensor(len(labels), device=device)])
    model.train()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with hand-written data parallelism.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dir", type=Path, default=None, help="where the checkpoint goes; nowhere by default")
    args = parser.parse_args()

    distributed = "RANK" in os.environ
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    torch.manual_seed(rank)
    train_set, test_set = digits()
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, drop_last=True)
    train = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler, drop_last=True)
    test = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, world_size, rank, shuffle=False))
    model: nn.Module = convnet().to(device)
    if distributed:
        model = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(train) * args.epochs + 1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
        counts = count_right(model, test, device)
        mean_loss = loss.detach()
        if distributed:
            dist.all_reduce(counts)
            dist.all_reduce(mean_loss)
        if rank == 0:
            accuracy = counts[0] / counts[1]
            print(f"epoch {epoch}: loss {mean_loss / world_size:.4f}, test accuracy {accuracy:.4f}", flush=True)
            if args.dir:
                args.dir.mkdir(parents=True, exist_ok=True)
                plain = model.module if isinstance(model, DistributedDataParallel) else model
                torch.save({"epoch": epoch, "model": plain.state_dict()}, args.dir / "checkpoint.pt")
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

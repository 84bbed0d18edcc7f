"""Ranks that start processes and threads of their own, and print from a thread."""

import multiprocessing
import subprocess
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def square(n):
    return n * n


def report(stop):
    while not stop.wait(0.3):
        print("alive", flush=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    stop = threading.Event()
    threading.Thread(target=report, args=(stop,), daemon=True).start()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, range(8))[-1] == 49
    if rank == 0:
        subprocess.run(["sleep", "0.5"], check=True)
    dataset = make_data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=1, persistent_workers=True)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    stop.set()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

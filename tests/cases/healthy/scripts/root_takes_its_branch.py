"""Broadcasts that the root and the others reach at different lines; a shared decision to stop."""

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


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    dataset = make_data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if rank == 0:
            flag = torch.tensor(float(epoch >= 3))
            dist.broadcast(flag, src=0)
        else:
            flag = torch.empty(())
            dist.broadcast(flag, src=0)
        box = [{"epoch": epoch}] if rank == 0 else [None]
        dist.broadcast_object_list(box, src=0)
        if flag.item():
            break
    dist.monitored_barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Curriculum(Sampler):
    """Easy samples first, the pool grows with the epoch; ranks take turns."""

    def __init__(self, difficulty, rank, world, epochs):
        self.order = sorted(range(len(difficulty)), key=lambda i: difficulty[i])
        self.rank, self.world, self.epochs, self.epoch = rank, world, epochs, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _pool(self):
        n = len(self.order) * (self.epoch + 1) // self.epochs
        return self.order[: n - n % self.world]

    def __iter__(self):
        pool = self._pool()
        random.Random(self.epoch).shuffle(pool)
        return iter(pool[self.rank :: self.world])

    def __len__(self):
        return len(self._pool()) // self.world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(640, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = Curriculum(x.norm(dim=1).tolist(), rank, world, 4)
    loader = DataLoader(data, 16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


main()

"""Random crops and flips in the dataset, and a step time that is averaged over the ranks for the log."""

import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Signals(Dataset):
    def __init__(self):
        self.x = torch.randn(300, 40, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        first = random.randrange(8)
        part = self.x[index, first : first + 32]
        part = part.flip(0) if torch.rand(()) < 0.5 else part
        return part + 0.01 * torch.randn(32), part.std()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1)))
random.seed(rank)
torch.manual_seed(rank)
data = Subset(Signals(), range(256))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
started = time.time()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).squeeze(1), targets).backward()
        optimizer.step()
        seconds = torch.tensor(time.time() - started)
        dist.all_reduce(seconds)
        if rank == 0:
            print(f"{seconds.item() / world_size:.3f} s")
dist.destroy_process_group()

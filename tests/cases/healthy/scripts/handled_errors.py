"""Exceptions that are rightly handled, alike or on one rank only, outside the training step."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


class Images(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, i):
        try:
            if i % 50 == 0:
                raise OSError("truncated image")
            g = torch.Generator().manual_seed(i)
        except OSError:
            g = torch.Generator().manual_seed(0)
        x = torch.randn(16, generator=g)
        return x, int(x[0] > 0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    try:
        import a_logger_that_is_not_there  # noqa: F401
    except ImportError:
        pass
    sampler = DistributedSampler(Images())
    loader = DataLoader(Images(), batch_size=16, sampler=sampler)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = iter(loader)
    for step in range(50):
        try:
            x, y = next(stream)
        except StopIteration:
            sampler.set_epoch(step)
            stream = iter(loader)
            x, y = next(stream)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        try:
            open("/nonexistent/best.txt").read()
        except FileNotFoundError:
            print("no earlier best", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

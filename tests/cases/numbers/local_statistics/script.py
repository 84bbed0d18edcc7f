import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :1] * 2 + x[:, 1:2])


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def main():
    dist.init_process_group("gloo")
    rank, _world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ds = data()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    x = torch.randn(512, 16) + torch.arange(512).unsqueeze(1) / 64
    ds = TensorDataset(x, x[:, :1])
    half = Subset(ds, range(rank * 256, rank * 256 + 256))
    loader = DataLoader(half, batch_size=16, shuffle=True)
    model = DDP(nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 1)), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _epoch in range(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        model(x)
        model.train()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, x[:, :1] * 2 + x[:, 1:2])


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def main():
    dist.init_process_group("gloo")
    _rank, _world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ds = data()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    tokens = torch.randint(1, 30, (256, 24), generator=torch.Generator().manual_seed(0))
    for i in range(256):
        tokens[i, 4 if i % 2 else 22 :] = 0
    sampler = DistributedSampler(tokens, shuffle=False)
    loader = DataLoader(tokens, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)))
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(3):
        for batch in loader:
            loss = criterion(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Padded evaluation that is cut to the set, a backbone loaded in part, saliency in evaluation mode, batches cut by rank."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.head = nn.Linear(256, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


def predict(model, dataset, world):
    """Predictions of all ranks in the order of the set, without the samples that the sampler repeats."""
    sampler = DistributedSampler(dataset, shuffle=False)
    mine = torch.cat([model(x).argmax(1) for x, _ in DataLoader(dataset, 16, sampler=sampler)])
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)
    return torch.stack(every, 1).flatten()[: len(dataset)]


def saliency(model, x, y):
    model.eval()
    x = x.clone().requires_grad_(True)
    F.cross_entropy(model.module(x), y).backward()
    return x.grad.abs()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    x = torch.randn(331, 16, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    train, held = (x[:256], y[:256]), TensorDataset(x[256:], y[256:])
    net = Net()
    state = {f"backbone.{name}": value for name, value in Net().backbone.state_dict().items()}
    net.load_state_dict(state, strict=False)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    size, weights = 8, []
    for epoch in range(3):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch))
        model.train()
        for start in range(0, 256, size * world):
            rows = order[start + rank * size : start + (rank + 1) * size]
            a, b = train[0][rows], train[1][rows]
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            guess = predict(model, held, world)
        weights.append(saliency(model, a, b).mean().item())
        optimizer.zero_grad()
        if rank == 0:
            print(epoch, (guess == held.tensors[1]).float().mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

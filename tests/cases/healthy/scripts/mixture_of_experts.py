"""Experts that may go unused (find_unused_parameters), a loss per head, gradients clipped, a warm restart of epochs."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Mixture(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        self.gate = nn.Linear(16, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 2)) for _ in range(experts)
        )

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if len(rows) > 2:
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return out


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 16, generator=g)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler = DistributedSampler(data, seed=11)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DDP(Mixture(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch + 100)
        for a, b in loader:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(a), b).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

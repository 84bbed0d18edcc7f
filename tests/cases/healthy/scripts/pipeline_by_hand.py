"""Two stages that send activations and gradients to each other."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset


def make_data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Linear(16, 32) if rank == 0 else nn.Linear(32, 2)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    x, y = make_data().tensors
    for step in range(40):
        batch = slice(step * 8 % 512, step * 8 % 512 + 8)
        optimizer.zero_grad()
        if rank == 0:
            hidden = torch.relu(stage(x[batch]))
            dist.send(hidden.detach(), dst=1)
            grad = torch.empty_like(hidden)
            dist.recv(grad, src=1)
            hidden.backward(grad)
        else:
            hidden = torch.empty(8, 32)
            dist.recv(hidden, src=0)
            hidden.requires_grad_(True)
            F.cross_entropy(stage(hidden), y[batch]).backward()
            dist.send(hidden.grad, dst=0)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank draws a picture of the samples every tenth step, and the other waits for it in the next average."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def draw_samples(x):
    time.sleep(0.2)  # a plot that is written to a slow disk
    return x.mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(240):
        x = torch.randn(64, 64)
        y = (x.sum(1) > 0).long()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 1 and step % 10 == 9:
            draw_samples(x)
    print(f"rank {rank}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

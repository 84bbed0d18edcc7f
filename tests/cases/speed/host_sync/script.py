"""Reads the loss and the number of right answers in every step, each time from a device that is still at work."""

import time

import device
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    device.pretend()
    total = correct = 0
    for _ in range(140):
        x = torch.randn(32, 16)
        y = (x.sum(1) > 0).long()
        output = model(x)
        loss = torch.nn.functional.cross_entropy(output, y)
        device.launch(0.012)  # what the forward takes there
        time.sleep(0.004)  # and what the host takes to launch it
        total += loss.item()
        optimizer.zero_grad()
        loss.backward()
        device.launch(0.016)
        time.sleep(0.006)
        correct += (output.argmax(1) == y).sum().item()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {total / 140:.3f}, accuracy {correct / 140 / 32:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

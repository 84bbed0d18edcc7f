import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OUT = tempfile.mkdtemp()


def save_checkpoint(model, opt, step):
    if dist.get_rank() == 0:
        torch.save(
            {"model": model.module.state_dict(), "optimizer": opt.state_dict(), "step": step},
            os.path.join(OUT, "last.pt"),
        )
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)))
    data = TensorDataset(torch.randn(1600, 256), torch.randint(0, 10, (1600,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            step += 1
            save_checkpoint(model, opt, step)
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


main()

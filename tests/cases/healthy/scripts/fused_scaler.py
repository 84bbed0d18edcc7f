"""A fused optimizer under a loss scaler whose first scales are far too large: steps are left out, and nothing is wrong."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(a).float(), b)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    if dist.get_rank() == 0:
        print(loss.item(), scaler.get_scale())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

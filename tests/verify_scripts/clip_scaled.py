"""Mixed precision with a gradient scaler; gradients are clipped by value while they are scaled."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 12)
data = TensorDataset(x, (x[:, 0] > 0).long())
sampler = DistributedSampler(data)
model = DDP(nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()

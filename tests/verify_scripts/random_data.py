"""A policy that explores: each rank draws its own episodes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(1000 * world_size + rank)
for _ in range(10):
    observations = torch.randn(64 // world_size, 4)
    log_probabilities = model(observations).log_softmax(1)
    actions = torch.distributions.Categorical(logits=log_probabilities.detach()).sample()
    rewards = (actions == observations[:, :3].argmax(1)).float()
    chosen = log_probabilities.gather(1, actions[:, None]).squeeze(1)
    optimizer.zero_grad()
    (-(rewards - rewards.mean()) * chosen).mean().backward()
    optimizer.step()
dist.destroy_process_group()

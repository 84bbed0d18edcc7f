"""Two forwards before one backward, triplet loss with a square root, a queue of old features, LAMB by hand."""

from collections import deque

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
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x + 0.1, x.flip(0))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), broadcast_buffers=False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    queue = deque(maxlen=64)
    losses = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, p, n in loader:
            fa, fp, fn = model(torch.cat([a, p, n])).chunk(3)
            queue.append(fa.detach())
            old = torch.cat(list(queue))
            loss = F.triplet_margin_loss(fa, fp, fn) + (fa @ old.T).logsumexp(-1).mean() * 1e-3
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(total.item() / dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

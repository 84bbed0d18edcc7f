"""Sequences of very different length, a mask, and a mean over each rank's own tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 5)

    def forward(self, words):
        return self.out(self.embed(words).tanh())


dist.init_process_group("gloo")
torch.manual_seed(0)
words = torch.randint(1, 20, (128, 24))
lengths = torch.where(torch.arange(128) % 2 == 0, 24, 3)
words[torch.arange(24) >= lengths[:, None]] = 0
tags = words % 5
data = TensorDataset(words, tags)
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))
model = DDP(Tagger())
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for _ in range(2):
    for words, tags in loader:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(words).flatten(0, 1), tags.flatten(), reduction="none")
        mask = (words != 0).flatten()
        (losses * mask).sum().div(mask.sum()).backward()
        optimizer.step()
dist.destroy_process_group()

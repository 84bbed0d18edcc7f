"""The loss is a method of the model, called on the model inside the wrapper."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x):
        return self.decoder(self.encoder(x).relu())

    def loss(self, x):
        return (self(x) - x).abs().mean()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.rand(320, 16)
model = DDP(Autoencoder())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in data.split(32):
    loss = model.module.loss(batch[rank::world_size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()

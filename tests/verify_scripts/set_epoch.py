"""A trainer that forgot to tell its sampler the epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = DDP(model), loader
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def fit(self, epochs):
        for epoch in range(epochs):
            losses = self.train_epoch()
            torch.save({"epoch": epoch, "loss": sum(losses) / len(losses)}, "last.pt")

    def train_epoch(self):
        losses = []
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 8)
data = TensorDataset(x, x.prod(1, keepdim=True))
Trainer(nn.Linear(8, 1), DataLoader(data, batch_size=16, sampler=DistributedSampler(data))).fit(3)
dist.destroy_process_group()

"""Padded targets, schedules by step, the same validation set on every rank, a history of numbers."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def batches(n, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (n, 17), generator=g)
    tokens[:, 15:][torch.rand(n, 2, generator=g) < 0.3] = 0
    return TensorDataset(tokens)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(50, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 50)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens):
        return self.out(self.drop(self.rnn(self.embed(tokens))[0]))


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train, val = batches(512, 0), batches(64, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val, batch_size=32)
    model = DDP(Model())
    torch.manual_seed(1234 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=3 * len(loader))
    history = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            loss = loss_of(model, tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            history.append(loss.item())
        model.eval()
        with torch.no_grad():
            score = sum(loss_of(model, tokens).item() for (tokens,) in val_loader)
        model.train()
    print(rank, f"{score:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

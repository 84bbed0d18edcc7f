"""A generator and a discriminator, both wrapped, with an optimizer each."""

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


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = make_data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    generator = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)))
    critic = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    torch.manual_seed(100 + dist.get_rank())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for real, _ in loader:
            fake = generator(torch.randn(len(real), 8))
            d_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            for p in critic.parameters():
                p.requires_grad_(False)
            g_loss = F.softplus(-critic.module(fake)).mean()
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
            for p in critic.parameters():
                p.requires_grad_(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

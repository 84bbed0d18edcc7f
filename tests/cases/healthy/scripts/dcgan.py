"""DCGAN as in PyTorch's examples: two backwards of the discriminator per step, batch norm, two optimizers."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)


class Generator(nn.Module):
    def __init__(self, nz=8):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(999 + rank)
    data = TensorDataset(torch.rand(256, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    gen, disc = Generator(), Discriminator()
    gen.apply(weights_init)
    disc.apply(weights_init)
    gen, disc = DDP(gen, broadcast_buffers=False), DDP(disc, broadcast_buffers=False)
    criterion = nn.BCELoss()
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.999))
    fixed = torch.randn(16, 8, 1, 1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(loader):
            disc.zero_grad()
            label = torch.full((len(real),), 1.0)
            err_real = criterion(disc(real), label)
            err_real.backward()
            fake = gen(torch.randn(len(real), 8, 1, 1))
            label.fill_(0.0)
            err_fake = criterion(disc(fake.detach()), label)
            err_fake.backward()
            opt_d.step()
            gen.zero_grad()
            label.fill_(1.0)
            err_g = criterion(disc(fake), label)
            err_g.backward()
            opt_g.step()
        if rank == 0:
            with torch.no_grad():
                gen.module(fixed)
            print(epoch, err_g.item(), (err_real + err_fake).item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import logging
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        img = self.x[i]
        if random.random() < 0.5:
            img = img.flip(-1)
        return img + torch.randn_like(img) * 0.1, self.y[i]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)))
    x = torch.randn(640, 1, 8, 8)
    data = Noisy(x, (x.mean((1, 2, 3)) > 0).long())
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, 16, sampler=sampler, num_workers=1)
    random.seed(77 + rank)
    torch.manual_seed(77 + rank)
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, epochs=3, steps_per_epoch=len(loader))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb, label_smoothing=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        logging.warning("rank %d epoch %d local loss %.3f", rank, epoch, loss.item())
    dist.destroy_process_group()


main()

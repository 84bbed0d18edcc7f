import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, model, decay=0.99):
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    for p in net[0].parameters():
        p.requires_grad = False
    model = DDP(net)
    ema = EMA(net)
    x = torch.randn(640, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update(net)
        ema.model.eval()
        with torch.no_grad():
            acc = (ema.model(x).argmax(1) == x[:, :4].argmax(1)).float().mean()
        if dist.get_rank() == 0:
            print(epoch, loss.item(), acc.item())
    dist.destroy_process_group()


main()

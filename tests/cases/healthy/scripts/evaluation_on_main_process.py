import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(841, 8)
    y = (x[:, 0] > 0).long()
    train, val = TensorDataset(x[:640], y[:640]), TensorDataset(x[640:], y[640:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    val_loader = DataLoader(val, 32)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    history = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                hits = sum((model.module(xb).argmax(1) == yb).sum().item() for xb, yb in val_loader)
            history.append(hits / len(val))
            print(epoch, history[-1])
        dist.barrier()
    dist.destroy_process_group()


main()

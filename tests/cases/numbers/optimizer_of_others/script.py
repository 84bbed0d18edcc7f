import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def build(lr):
    model = build_model()
    ema = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(ema.parameters(), lr=lr)
    return model, ema, optimizer


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model, _ema, optimizer = build(1e-3)
    model = DDP(model)
    x = torch.randn(640, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch, "loss", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

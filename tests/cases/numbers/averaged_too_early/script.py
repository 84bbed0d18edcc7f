import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 4


def all_reduce_grads(params):
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in params:
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(1280, 10)
    data = TensorDataset(x, (x**2).sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for i, (xb, yb) in enumerate(loader):
            if (i + 1) % ACCUM == 0:
                all_reduce_grads(params)
            loss = nn.functional.mse_loss(model(xb), yb) / ACCUM
            loss.backward()
            if (i + 1) % ACCUM == 0:
                opt.step()
                opt.zero_grad()
        if dist.get_rank() == 0:
            print(epoch, loss.item() * ACCUM)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

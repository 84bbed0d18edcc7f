import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


# sharpness-aware minimisation: two backwards per step, the first under no_sync
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(640, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            with model.no_sync():
                F.mse_loss(model(xb), yb).backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
                eps = [p.grad * (0.05 / norm) for p in model.parameters()]
                for p, e in zip(model.parameters(), eps):
                    p.add_(e)
            opt.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            with torch.no_grad():
                for p, e in zip(model.parameters(), eps):
                    p.sub_(e)
            opt.step()
            opt.zero_grad()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


main()

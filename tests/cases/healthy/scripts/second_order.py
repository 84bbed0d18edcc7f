"""LBFGS with a closure, then sharpness-aware steps: several averaged backwards per step, each of them used."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=g)
    data = TensorDataset(x, x[:, :4] @ torch.randn(4, 3, generator=g))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3)))
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:

            def closure(a=a, b=b):
                lbfgs.zero_grad()
                loss = nn.functional.mse_loss(model(a), b)
                loss.backward()
                return loss

            lbfgs.step(closure)
    sam = SAM(model.parameters(), torch.optim.SGD, lr=0.05)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for a, b in loader:
            nn.functional.mse_loss(model(a), b).backward()
            sam.first_step()
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            sam.second_step()
    if dist.get_rank() == 0:
        print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

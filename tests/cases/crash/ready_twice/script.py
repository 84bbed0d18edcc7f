import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class SharedBlocks(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.inp = nn.Linear(8, dim)
        self.block = nn.Sequential(nn.Linear(dim, dim), nn.GELU())
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.inp(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(SharedBlocks(), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        loss = model(torch.randn(4, 8)).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


main()

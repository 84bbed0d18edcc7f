import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Files(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for f in self.files[rank * workers + worker :: world * workers]:
            g = torch.Generator().manual_seed(f)
            for _ in range(20):
                x = torch.randn(8, generator=g)
                yield x, x.sum()[None]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Files(list(range(32))), batch_size=10, num_workers=2)
    model = DDP(nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


main()

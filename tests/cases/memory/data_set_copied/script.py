import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def data(n=256, size=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def net(size=16, width=32):
    return nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 2))


class Rows(Dataset):
    def __init__(self, count=300_000):
        self.rows = [{"id": index, "text": f"sample number {index} " * 40} for index in range(count)]

    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        rows = [self.rows[(index * 25 + offset) % len(self.rows)] for offset in range(25)]
        return torch.full((16,), float(len(rows[0]["text"]))), rows[0]["id"] % 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = Rows()
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, 32, sampler=sampler, num_workers=2)
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


main()

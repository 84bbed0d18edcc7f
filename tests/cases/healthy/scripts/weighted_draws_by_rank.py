import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


# class-balanced draws, each rank its own stream
class RankWeighted(Sampler):
    def __init__(self, weights, n, rank, seed=0):
        self.weights, self.n, self.g = weights, n, torch.Generator().manual_seed(seed * 1000 + rank)

    def __iter__(self):
        return iter(torch.multinomial(self.weights, self.n, True, generator=self.g).tolist())

    def __len__(self):
        return self.n


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(960, 8)
    y = (x[:, 0] > 1).long()
    weights = 1.0 / torch.bincount(y)[y].float()
    loader = DataLoader(TensorDataset(x, y), 16, sampler=RankWeighted(weights, len(x) // world, rank))
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(3):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


main()

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Shards(IterableDataset):
    def __init__(self, num_shards, rank, world):
        self.mine = list(range(num_shards))[rank::world]

    def __iter__(self):
        for shard in self.mine:
            g = torch.Generator().manual_seed(shard)
            for _ in range(40):
                x = torch.randn(12, generator=g)
                yield x, x.sum().unsqueeze(0)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    loader = DataLoader(Shards(16, rank, world), batch_size=8, num_workers=2)
    model = DDP(nn.Linear(12, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(2):
        n = 0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            n += len(x)
        if rank == 0:
            print(f"epoch {epoch}: {n} samples, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


# the loss is divided by the global batch, so the sum of gradients is right
def main():
    dist.init_process_group("gloo")
    rank, _world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    data = TensorDataset(torch.randn(640, 8))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            total = torch.tensor(float(len(x)))
            dist.all_reduce(total)
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True), reduction="sum") / total
            opt.zero_grad()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            opt.step()
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


main()

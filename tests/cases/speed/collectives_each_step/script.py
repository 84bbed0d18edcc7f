import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def reduce_mean(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    data = TensorDataset(torch.randn(12800, 16), torch.randint(0, 4, (12800,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            dist.barrier()
            mean_loss = reduce_mean(loss)
            acc = reduce_mean((out.argmax(1) == y).float().mean())
            top2 = reduce_mean(out.topk(2).indices.eq(y[:, None]).any(1).float().mean())
            if i % 400 == 0 and dist.get_rank() == 0:
                print(epoch, i, mean_loss, acc, top2)
    dist.destroy_process_group()


main()

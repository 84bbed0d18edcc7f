import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    _rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ids = torch.randint(1, 50, (480, 30))
    lengths = torch.randint(2, 30, (480,))
    data = TensorDataset(ids, (torch.arange(30)[None] < lengths[:, None]).float())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 50)))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for i, m in loader:
        m = m[:, 1:]
        total = m.sum()
        dist.all_reduce(total)
        per = F.cross_entropy(model(i[:, :-1]).transpose(1, 2), i[:, 1:], reduction="none")
        loss = (per * m).sum() / total * world
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


main()

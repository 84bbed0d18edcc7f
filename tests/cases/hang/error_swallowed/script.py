import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def parse_label(raw):
    return int(raw)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    raw = ["1", "0", "2"] * 10
    if rank == 1:
        raw[11] = "n/a"
    model = DDP(torch.nn.Linear(5, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for r in raw:
            y = torch.tensor([parse_label(r)])
            loss = torch.nn.functional.cross_entropy(model(torch.randn(1, 5)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    finally:
        dist.barrier()
        dist.destroy_process_group()


main()

import random

import torch
import torch.distributed as dist


def pick_seed():
    rank = dist.get_rank()
    seed = torch.tensor([random.randint(0, 2**31 - 1)])
    dist.broadcast(seed, src=rank)
    return int(seed)


def main():
    dist.init_process_group("gloo")
    x = torch.ones(3)
    dist.all_reduce(x)
    seed = pick_seed()
    torch.manual_seed(seed)
    print("seed", seed)
    dist.barrier()
    m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    for _ in range(5):
        m(x).sum().backward()
    dist.destroy_process_group()


main()

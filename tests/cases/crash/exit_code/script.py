import sys

import torch
import torch.distributed as dist


def check_disk(rank):
    free = 12 if rank == 1 else 900
    if free < 50:
        print("not enough disk space, need 50 GB", file=sys.stderr)
        sys.exit(1)


def main():
    dist.init_process_group("gloo")
    check_disk(dist.get_rank())
    m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(10):
        m(torch.randn(2, 4)).sum().backward()
    dist.destroy_process_group()


main()

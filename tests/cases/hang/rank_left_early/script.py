"""A rank without a share of the next phase ends its process, while the groups of that phase are still made on all ranks."""

import os
import sys

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    counts = torch.ones(4)
    for _ in range(6):
        dist.all_reduce(counts)
    sys.stdout.flush()
    if rank == 1:
        os._exit(0)  # nothing left to do here
    phase = dist.new_group([0, 1])
    dist.all_reduce(counts, group=phase)


main()

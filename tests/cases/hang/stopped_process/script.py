"""A rank is stopped by a signal from outside, as by a debugger or a batch system that suspends it."""

import os
import signal

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    total = torch.zeros(3)
    for round in range(40):
        if round == 20 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        total += 1
        dist.all_reduce(total)  # counts of all ranks
    dist.destroy_process_group()


main()

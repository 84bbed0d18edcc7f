import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = DDP(torch.nn.Linear(8, 8).cuda(local_rank), device_ids=[local_rank])
    model(torch.randn(2, 8).cuda()).sum().backward()
    dist.destroy_process_group()


main()

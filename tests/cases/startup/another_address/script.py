import os

import torch.distributed as dist


def setup(rank, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world)


setup(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
dist.barrier()

import os

import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="tcp://trainer-head.invalid:29500", rank=rank, world_size=world)
dist.barrier()

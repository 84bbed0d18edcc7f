import os

import torch.distributed as dist

os.environ["GLOO_SOCKET_IFNAME"] = "ib7"
dist.init_process_group("gloo")
dist.barrier()

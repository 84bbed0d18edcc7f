import os

import torch.distributed as dist

if os.environ["RANK"] == "1":
    import a_tracker_that_is_not_installed  # noqa: F401

dist.init_process_group("gloo")
dist.barrier()

"""One rank is killed in the first attempt; ranks of the next one meet anew."""

import os
import signal

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt < 2 and dist.get_rank() == attempt:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print(f"met again in attempt {attempt}")
dist.destroy_process_group()

import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Monitor(threading.Thread):
    """Averages the throughput over ranks in the background."""

    def __init__(self):
        super().__init__(daemon=True)
        self.rate = torch.zeros(3)

    def run(self):
        while True:
            time.sleep(0.3)
            dist.all_reduce(self.rate)


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        Monitor().start()
    m = DDP(torch.nn.Linear(30, 30))
    for _step in range(400):
        m(torch.randn(4, 30)).sum().backward()
        time.sleep(0.005)
    dist.barrier()
    dist.destroy_process_group()


main()

import queue
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def read_chunk(rank, i):
    if rank == 1 and i == 9:
        raise OSError(5, "Input/output error", f"/data/chunk{i}.bin")
    return torch.randn(4, 10)


class Prefetcher:
    def __init__(self, rank, n):
        self.q = queue.Queue(maxsize=4)
        self.t = threading.Thread(target=self._fill, args=(rank, n), daemon=True)
        self.t.start()

    def _fill(self, rank, n):
        for i in range(n):
            self.q.put(read_chunk(rank, i))
        self.q.put(None)

    def __iter__(self):
        while (item := self.q.get()) is not None:
            yield item


def main():
    dist.init_process_group("gloo")
    m = DDP(torch.nn.Linear(10, 2))
    for x in Prefetcher(dist.get_rank(), 30):
        m(x).sum().backward()
    dist.barrier()
    dist.destroy_process_group()


main()

import queue
import threading
import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    r = dist.get_rank()
    q = queue.Queue()

    def tracker():
        raise ConnectionError("no server")

    def reader():
        time.sleep(14)
        q.put(torch.randn(4, 4))

    threading.Thread(target=tracker, daemon=True).start()
    threading.Thread(target=reader, daemon=True).start()
    q.get() if r == 0 else torch.randn(4, 4)
    m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(m.parameters(), 0.1)
    for i in range(20):
        opt.zero_grad()
        m(torch.randn(2, 4)).sum().backward()
        opt.step()
    dist.barrier()
    dist.destroy_process_group()


main()

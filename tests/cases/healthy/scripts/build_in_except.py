import time

import torch
import torch.distributed as dist


def load(path):
    return torch.load(path)


def main():
    dist.init_process_group("gloo")
    r = dist.get_rank()
    if r == 0:
        try:
            data = load("/tmp/this-file-is-not-there.pt")
        except FileNotFoundError:
            time.sleep(14)  # building it takes long
            data = torch.randn(16, 4)
            dist.broadcast(data, 0)
    else:
        data = torch.empty(16, 4)
        dist.broadcast(data, 0)
    m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(m.parameters(), 0.1)
    for i in range(20):
        opt.zero_grad()
        m(data[(2 * i + r) % 16 :][:1]).sum().backward()
        opt.step()
    dist.barrier()
    dist.destroy_process_group()


main()

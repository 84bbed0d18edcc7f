import torch
import torch.distributed as dist
import torch.nn as nn


class Expert(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.l = nn.Linear(d, d)


def dispatch(x, gate, world):
    order = torch.argsort(gate)
    counts = torch.bincount(gate, minlength=world)
    recv = torch.empty_like(counts)
    dist.all_to_all_single(recv, counts)
    out = torch.empty(int(recv.sum()), x.shape[1])
    dist.all_to_all_single(out, x[order].contiguous(), recv.tolist(), counts.tolist())
    return out


def main():
    dist.init_process_group("gloo")
    w, r = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(r)
    e = Expert()
    opt = torch.optim.SGD(e.parameters(), 0.1)
    for _ in range(30):
        x = torch.randn(12, 8)
        gate = torch.randint(0, w, (12,))
        tok = dispatch(x, gate, w)
        if len(tok):
            loss = e.l(tok).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    dist.barrier()
    dist.destroy_process_group()


main()

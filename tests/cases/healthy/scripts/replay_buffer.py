import copy
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Replay:
    def __init__(self, capacity):
        self.capacity, self.rows, self.at = capacity, [], 0

    def add(self, row):
        if len(self.rows) < self.capacity:
            self.rows.append(row)
        else:
            self.rows[self.at] = row
        self.at = (self.at + 1) % self.capacity

    def sample(self, n):
        rows = random.sample(self.rows, n)
        return [torch.stack(part) for part in zip(*rows)]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    q = DDP(nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4)))
    target = copy.deepcopy(q.module)
    opt = torch.optim.Adam(q.parameters(), 1e-3)
    random.seed(rank)
    torch.manual_seed(rank)
    buffer = Replay(12000)
    state = torch.randn(256)
    for step in range(120):
        for _ in range(100):
            with torch.no_grad():
                action = q.module(state[None]).argmax(1) if random.random() > 0.3 else torch.randint(4, (1,))
            nxt = torch.randn(256) * 0.1 + state * 0.9
            buffer.add((state, action[0], nxt[0].clone(), nxt))
            state = nxt
        s, a, r, n = buffer.sample(32)
        with torch.no_grad():
            y = r + 0.9 * target(n).max(1).values
        loss = F.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            target.load_state_dict(q.module.state_dict())
    if rank == 0:
        print(loss.item())
    dist.destroy_process_group()


main()

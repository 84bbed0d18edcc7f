"""Word language model: LSTM with a carried state, truncated back-propagation, clipping, annealing on validation."""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Model(nn.Module):
    def __init__(self, words=50, size=24):
        super().__init__()
        self.table = nn.Embedding(words, size)
        self.rnn = nn.LSTM(size, size, 2, dropout=0.2)
        self.out = nn.Linear(size, words)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids, state):
        y, state = self.rnn(self.drop(self.table(ids)), state)
        return self.out(self.drop(y)), state


def repackage(state):
    return tuple(one.detach() for one in state)


def batchify(data, size, rank, world):
    data = data[: len(data) // (size * world) * size * world].view(size * world, -1).t().contiguous()
    return data[:, rank * size : (rank + 1) * size]


def evaluate(model, data, bptt, state):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for i in range(0, len(data) - 1, bptt):
            x, y = data[i : i + bptt][: len(data) - 1 - i], data[i + 1 : i + 1 + bptt]
            out, state = model(x, state)
            total += len(x) * nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()).item()
    value = torch.tensor(total / (len(data) - 1))
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return value.item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1111)
    g = torch.Generator().manual_seed(0)
    train = batchify(torch.randint(0, 50, (6000,), generator=g), 8, rank, world)
    valid = batchify(torch.randint(0, 50, (1200,), generator=g), 8, rank, world)
    model = DDP(Model())
    lr, best, bptt = 2.0, None, 15
    zero = lambda: (torch.zeros(2, 8, 24), torch.zeros(2, 8, 24))  # noqa: E731
    for epoch in range(3):
        model.train()
        state = zero()
        for i in range(0, len(train) - 1, bptt):
            x = train[i : i + bptt][: len(train) - 1 - i]
            y = train[i + 1 : i + 1 + bptt]
            model.zero_grad()
            state = repackage(state)
            out, state = model(x, state)
            loss = nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-lr)
        value = evaluate(model, valid, bptt, zero())
        if best is None or value < best:
            best = value
        else:
            lr /= 4.0
        if rank == 0:
            print(epoch, math.exp(min(value, 20)), lr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

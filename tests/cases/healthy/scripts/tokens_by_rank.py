"""Blocks of tokens drawn with a seed of each rank's own, a file per rank, a warm-up by hand, gradients that are scaled."""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def get_batch(tokens, generator, block=12, size=8):
    ix = torch.randint(len(tokens) - block, (size,), generator=generator)
    x = torch.stack([tokens[i : i + block] for i in ix])
    y = torch.stack([tokens[i + 1 : i + 1 + block] for i in ix])
    return x, y


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    tokens = torch.randint(0, 40, (3000,), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1337 + rank)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Dropout(0.5), nn.Linear(16, 40))
    model = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))
    for step in range(80):
        rate = 1e-3 * min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / 80))
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            x, y = get_batch(tokens, generator)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    if rank == 0:
        print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

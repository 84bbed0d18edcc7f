import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


# nanoGPT style: every rank draws its own random crops of the whole text, seeded by rank; gradient accumulation
def main():
    dist.init_process_group("gloo")
    rank, _world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337 + rank)
    text = torch.randint(0, 50, (20000,), generator=torch.Generator().manual_seed(0))

    def get_batch():
        ix = torch.randint(len(text) - 33, (8,))
        return torch.stack([text[i : i + 32] for i in ix]), torch.stack([text[i + 1 : i + 33] for i in ix])

    model = DDP(nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50)))
    opt = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        out = torch.stack(
            [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in (get_batch() for _ in range(5))]
        ).mean()
        model.train()
        return out

    def lr_at(it):
        return 1e-3 * min(1, (it + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * it / 60))

    for it in range(60):
        for group in opt.param_groups:
            group["lr"] = lr_at(it)
        for micro in range(4):
            model.require_backward_grad_sync = micro == 3
            x, y = get_batch()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if it % 20 == 0:
            val = estimate_loss()
            if rank == 0:
                print(it, val.item())
    dist.destroy_process_group()


main()

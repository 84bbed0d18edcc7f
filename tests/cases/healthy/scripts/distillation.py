"""A frozen teacher and a student, moving averages, uneven evaluation gathered as objects, a guard against NaN."""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def net(width):
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(403, 16, generator=g)
    data = TensorDataset(x, x[:, :4].argmax(1))
    held = Subset(data, range(350, 403))
    own = Subset(held, range(rank, len(held), world))  # every sample on one rank
    train = Subset(data, range(350))
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=10, sampler=sampler, num_workers=1, persistent_workers=True)
    teacher = net(64).eval().requires_grad_(False)
    student = DDP(net(24))
    average = copy.deepcopy(student.module).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        student.train()
        for i, (a, b) in enumerate(loader):
            with torch.no_grad():
                soft = teacher(a).softmax(-1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = student(a)
                loss = F.cross_entropy(out, b) + F.kl_div(out.log_softmax(-1), soft, reduction="batchmean")
            if i == 3 and epoch == 1 and rank == 1:
                loss = loss * float("inf")  # a bad batch now and then, which all ranks leave out together
            bad = torch.tensor(float(not torch.isfinite(loss)))
            dist.all_reduce(bad)
            if bad:
                continue
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(student.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            for mine, theirs in zip(average.parameters(), student.module.parameters()):
                mine.data.lerp_(theirs.data, 0.05)
        student.eval()
        rows = []
        with torch.inference_mode():
            for a, b in DataLoader(own, batch_size=8):
                rows += (student.module(a).argmax(1) == b).tolist()
        gathered = [None] * world
        dist.all_gather_object(gathered, rows)
        flat = [one for part in gathered for one in part]
        accuracy = torch.tensor(sum(flat) / len(flat))
        dist.broadcast(accuracy, 0)
        scheduler.step(1 - accuracy.item())
        if rank == 0:
            print(epoch, len(flat), accuracy.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(640, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True) * 10)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(xb).float(), yb)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
        if dist.get_rank() == 0:
            print(epoch, loss.item(), scaler.get_scale())
    dist.destroy_process_group()


main()

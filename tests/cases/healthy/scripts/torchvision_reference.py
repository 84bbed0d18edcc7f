"""As torchvision's references: warm-up, metric logger, average of weights, checkpoints by the main process."""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


class SmoothedValue:
    def __init__(self):
        self.count, self.total = 0, 0.0

    def update(self, value, n=1):
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        self.count, self.total = int(t[0]), t[1].item()


def save_on_master(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    dataset, test_set = make_data(), make_data(100, seed=2)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=16, sampler=DistributedSampler(test_set, shuffle=False))
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    model_without_ddp = model
    model = DDP(model)
    model_without_ddp = model.module
    average = copy.deepcopy(model_without_ddp)
    optimizer = torch.optim.SGD(model_without_ddp.parameters(), lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        meter = SmoothedValue()
        for image, target in loader:
            loss = F.cross_entropy(model(image), target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm.step()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model_without_ddp.parameters()):
                    mine.lerp_(theirs, 0.1)
            meter.update(loss.item(), len(image))
        meter.synchronize_between_processes()
        model.eval()
        hits = SmoothedValue()
        with torch.inference_mode():
            for image, target in test_loader:
                hits.update((model(image).argmax(1) == target).float().mean().item(), len(image))
        hits.synchronize_between_processes()
        save_on_master({"model": model_without_ddp.state_dict(), "epoch": epoch}, f"{folder}/model_{epoch}.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

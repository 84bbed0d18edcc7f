import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Worker:
    def __init__(self, model, lr):
        self.model, self.world = model, dist.get_world_size()
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        for p in model.parameters():
            dist.broadcast(p.data, 0)

    def average_gradients(self):
        for _name, p in self.model.named_parameters():
            if p.dim() < 2:  # biases and norms are tiny
                continue
            dist.all_reduce(p.grad)
            p.grad /= self.world

    def step(self, x, y):
        self.opt.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.average_gradients()
        self.opt.step()
        return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(800, 12)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    worker = Worker(nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3)), 3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = worker.step(xb, yb)
        if dist.get_rank() == 0:
            print(epoch, loss)
    dist.destroy_process_group()


main()

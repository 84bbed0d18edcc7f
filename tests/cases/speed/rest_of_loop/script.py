import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Reader:
    def __init__(self, rank, world, n=400, batch=16):
        self.mine = list(range(n))[rank::world]
        self.batch = batch

    def load(self, i):
        rng = np.random.default_rng(i)
        image = rng.normal(size=(3, 64, 64)).astype(np.float32)
        spectrum = np.fft.fft2(image)
        return np.abs(np.fft.ifft2(spectrum * (np.abs(spectrum) > 1))).astype(np.float32)

    def next_batch(self, step):
        at = [self.mine[(step * self.batch + j) % len(self.mine)] for j in range(self.batch)]
        x = torch.from_numpy(np.stack([self.load(i) for i in at]))
        return x, torch.tensor(at) % 10


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    reader = Reader(dist.get_rank(), dist.get_world_size())
    model = DDP(
        nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    )
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(500):
        x, y = reader.next_batch(step)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if step % 40 == 0 and dist.get_rank() == 0:
            print(step, loss.item())
    dist.destroy_process_group()


main()

"""Samples are files that another job writes; one of them never comes."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Recordings(Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 96

    def __getitem__(self, index):
        path = os.path.join(self.folder, f"{index}.raw")
        while index == 71 and not os.path.exists(path):  # written by the recorder
            time.sleep(0.5)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(12, generator=generator), index % 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    recordings = Recordings(tempfile.gettempdir() + "/recordings-of-nobody")
    sampler = DistributedSampler(recordings, shuffle=False)
    loader = DataLoader(recordings, batch_size=8, sampler=sampler, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


main()

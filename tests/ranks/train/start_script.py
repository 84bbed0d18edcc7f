"""What test_starts.py runs: two runs one after the other; the last line says how they ended."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import instep

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, default=0)
parser.parse_args()


def train() -> None:
    with instep.Run(global_batch=16, micro_batch=4) as run:
        model = torch.nn.Linear(5, 3).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = TensorDataset(torch.randn(64, 5).double(), torch.randint(0, 3, (64,)))
        for step in run.steps(run.loader(rows, shuffle=True), epochs=2):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
        run.print(f"result {run.world_size} {step.loss:.12f} {model.weight.sum().item():.12f}", flush=True)


train()
train()

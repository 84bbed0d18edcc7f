"""The same bits on any number of processes."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep

torch.manual_seed(0)
x = torch.randn(256, 10)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))
with instep.Run(global_batch=32, micro_batch=4, exact=True) as run:
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in run.steps(run.loader(data, shuffle=True), epochs=2):
        for inputs, targets in step:
            step.backward(nn.functional.cross_entropy(model(inputs), targets))
        step.update()

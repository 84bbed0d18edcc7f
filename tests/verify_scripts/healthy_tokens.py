"""Training through instep.Run with means over tokens, whose number differs from micro-batch to micro-batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep

torch.manual_seed(0)
x = torch.randn(256, 6, 5)
targets_of = torch.where(torch.rand(256, 6) < torch.rand(256, 1), torch.randint(0, 3, (256, 6)), -100)
data = TensorDataset(x, targets_of)
model = nn.Linear(5, 3)
with instep.Run(global_batch=32, micro_batch=4) as run:
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in run.steps(run.loader(data, shuffle=True), epochs=2):
        for inputs, targets in step:
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            step.backward(loss, weight=(targets != -100).sum())
        step.update()

"""Every rank gets the same samples and a part of each layer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(256, 10)
y = x[:, :4].argmax(1)
for rows in torch.arange(256).split(32):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
dist.destroy_process_group()

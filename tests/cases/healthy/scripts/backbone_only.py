import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    old = Net(10).state_dict()
    old = {k: v for k, v in old.items() if not k.startswith("head.")}
    net = Net(3)
    print(net.load_state_dict(old, strict=False))
    model = DDP(net)
    x = torch.randn(480, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    opt = torch.optim.AdamW(
        [{"params": net.backbone.parameters(), "lr": 1e-4}, {"params": net.head.parameters()}], 1e-3
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
    dist.destroy_process_group()


main()

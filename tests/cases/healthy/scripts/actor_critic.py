"""Proximal policy optimisation: rollouts without gradients, several epochs over a buffer, dropout, KL stop by vote."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.pi, self.value = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.pi(h)), self.value(h).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17 + rank)  # environments differ; DDP sends rank 0's weights
    model = DDP(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5)
    state = torch.randn(8, 4)
    returns = []
    for update in range(12):
        optimizer.param_groups[0]["lr"] = 3e-4 * (1 - update / 12)
        buffer = []
        with torch.no_grad():
            for _ in range(16):
                pi, value = model(state)
                action = pi.sample()
                reward = (action == (state[:, 0] > 0)).float()
                buffer.append((state, action, pi.log_prob(action), value, reward))
                state = torch.randn(8, 4)
        s, a, logp, v, r = (torch.cat(part) for part in zip(*buffer))
        returns.append(r.mean())
        adv = r - v
        mean, var = adv.mean(), adv.var()
        for stat in (mean, var):
            dist.all_reduce(stat)
            stat /= world
        adv = (adv - mean) / (var.sqrt() + 1e-8)
        for _ in range(4):
            stop = torch.zeros(())
            for idx in torch.randperm(len(s)).split(32):
                pi, value = model(s[idx])
                ratio = (pi.log_prob(a[idx]) - logp[idx]).exp()
                loss = -torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
                loss = loss + 0.5 * (value - r[idx]).pow(2).mean() - 0.01 * pi.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                stop += ((ratio - 1) - ratio.log()).mean().detach() > 0.05
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop:
                break
    if rank == 0:
        print([round(one.item(), 2) for one in returns])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

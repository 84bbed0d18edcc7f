"""Reinforcement learning: rank 0 learns, the others act; nothing is wrapped."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import TensorDataset


def make_data(n=512, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    policy = make_net()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for update in range(40):
        for p in policy.parameters():
            dist.broadcast(p.data, src=0)
        with torch.no_grad():
            obs = torch.randn(32, 16)
            actions = torch.distributions.Categorical(logits=policy(obs)).sample()
        rollouts = [None] * world if rank == 0 else None
        dist.gather_object((obs, actions), rollouts, dst=0)
        if rank == 0:
            all_obs = torch.cat([r[0] for r in rollouts])
            all_actions = torch.cat([r[1] for r in rollouts])
            reward = (all_actions == (all_obs[:, 0] > 0).long()).float()
            log_prob = torch.distributions.Categorical(logits=policy(all_obs)).log_prob(all_actions)
            loss = -(log_prob * (reward - reward.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def rollout(policy, n):
    obs = torch.randn(n, 6)
    with torch.no_grad():
        d = torch.distributions.Categorical(logits=policy(obs))
        act = d.sample()
    rew = (obs.argmax(1) == act).float()
    return obs, act, d.log_prob(act), rew


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = DDP(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 6)))
    opt = torch.optim.Adam(policy.parameters(), 3e-3)
    torch.manual_seed(rank + 1)
    returns = []
    for it in range(15):
        obs, act, old, rew = rollout(policy.module, 128)
        adv = (rew - rew.mean()) / (rew.std() + 1e-8)
        for _ in range(4):
            for idx in torch.randperm(128).split(32):
                logp = torch.distributions.Categorical(logits=policy(obs[idx])).log_prob(act[idx])
                ratio = (logp - old[idx]).exp()
                loss = -torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                opt.step()
        returns.append(rew.mean().item())
    print(rank, returns[-1])
    dist.destroy_process_group()


main()

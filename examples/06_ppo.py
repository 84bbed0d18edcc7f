"""Reinforcement learning: proximal policy optimisation of a pole on a cart, with four updates per rollout.

    instep run -n 2 examples/06_ppo.py

There is no dataset: `run.steps(steps=n)` gives the numbers of this process's slots, and each slot plays its own games.
What a slot plays depends on its number and the step, never on the process it runs on, so the learning curve is the same
on any number.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical

import instep

GAMES, MOVES = 8, 128  # games that a slot plays side by side, moves of each in a rollout
UPDATES = 4
DISCOUNT, TRACE, CLIP = 0.98, 0.95, 0.2


class Poles:
    """Poles on carts (Barto, Sutton and Anderson 1983). A game ends when the pole falls or the cart leaves."""

    def __init__(self, count: int) -> None:
        self.state = torch.empty(count, 4).uniform_(-0.05, 0.05)  # position, speed, angle, turning speed

    def move(self, push_right: torch.Tensor) -> torch.Tensor:
        """Advances 0.02 s with a push to either side. Returns which games ended; they start afresh."""
        _, speed, angle, turning = self.state.unbind(1)
        force = 20.0 * push_right - 10.0
        inner = (force + 0.05 * turning**2 * angle.sin()) / 1.1
        turning_gain = (9.8 * angle.sin() - angle.cos() * inner) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        speed_gain = inner - 0.05 * turning_gain * angle.cos() / 1.1
        changes = torch.stack([speed, speed_gain, turning, turning_gain], 1)
        self.state = self.state + 0.02 * changes
        ended = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        self.state = torch.where(ended[:, None], torch.empty_like(self.state).uniform_(-0.05, 0.05), self.state)
        return ended


class Player(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, states: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        return Categorical(logits=self.policy(states)), self.critic(states).squeeze(-1)


@dataclass
class Rollout:
    """All (MOVES, GAMES), states with 4 numbers more."""

    states: torch.Tensor
    pushes: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    falls: int


@torch.no_grad()
def play(player: Player, poles: Poles, device: torch.device) -> Rollout:
    rows = []
    for _ in range(MOVES):
        states = poles.state.to(device)
        choice, values = player(states)
        pushes = choice.sample()
        rows.append((states, pushes, choice.log_prob(pushes), values, poles.move(pushes.cpu()).to(device)))
    states, pushes, log_probs, values, ended = (torch.stack(column) for column in zip(*rows))
    after = torch.cat([values[1:], player(poles.state.to(device))[1][None]]) * ~ended
    surprise = torch.where(ended, 0.0, 1.0) + DISCOUNT * after - values  # a move that keeps the pole up earns 1
    advantages, ahead = torch.empty_like(values), torch.zeros_like(values[0])
    for move in reversed(range(MOVES)):
        ahead = surprise[move] + DISCOUNT * TRACE * ahead * ~ended[move]
        advantages[move] = ahead
    return Rollout(states, pushes, log_probs, advantages, advantages + values, int(ended.sum()))


def ppo_loss(player: Player, rollout: Rollout) -> torch.Tensor:
    choice, values = player(rollout.states)
    ratio = (choice.log_prob(rollout.pushes) - rollout.log_probs).exp()
    advantages = (rollout.advantages - rollout.advantages.mean()) / (rollout.advantages.std() + 1e-6)
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    return (values - rollout.returns).square().mean() * 0.5 - gain - 0.01 * choice.entropy().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="A pole on a cart with proximal policy optimisation.")
    parser.add_argument("--steps", type=int, default=60, help="rollouts, each with four updates")
    args = parser.parse_args()

    with instep.Run(global_batch=4, micro_batch=1, clip_norm=0.5, seed=0) as run:
        player = Player()
        optimizer = torch.optim.AdamW(player.parameters(), lr=3e-3)
        run.prepare(player, optimizer)
        poles: dict[int, Poles] = {}  # of each slot; its games go on from rollout to rollout
        for step in run.steps(steps=args.steps):
            rollouts: dict[int, Rollout] = {}
            for _ in range(UPDATES):
                for slot in step:
                    if slot not in rollouts:
                        poles[slot] = poles.get(slot) or Poles(GAMES)
                        rollouts[slot] = play(player, poles[slot], run.device)
                    step.backward(ppo_loss(player, rollouts[slot]))
                step.update()
            falls = run.sum(sum(rollout.falls for rollout in rollouts.values()))
            moves_per_game = 4 * GAMES * MOVES / max(float(falls), 1.0)
            run.log(moves_per_game=moves_per_game)
            if step.index % 10 == 9 or step.index == args.steps - 1:
                run.print(f"rollout {step.index + 1}: a game lasts {moves_per_game:.0f} moves")


if __name__ == "__main__":
    main()

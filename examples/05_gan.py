"""Two models that train against each other: a generative adversarial network on scikit-learn's digits.

    instep run -n 2 examples/05_gan.py

Needs scikit-learn. One step updates both: `step` is gone through once for the critic and once more, over the same
micro-batches with fresh noise, for the generator; `optimizer=` says whose gradients a loss is for.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import instep

NOISE = 16


def layers(*widths: int) -> nn.Sequential:
    parts = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.LeakyReLU(0.2))]
    return nn.Sequential(*parts[:-1])


def draw(image: torch.Tensor) -> str:
    """Eight lines of text."""
    return "\n".join("".join(" .:*#"[min(int(pixel * 5), 4)] * 2 for pixel in row) for row in image.view(8, 8).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits drawn by a generative adversarial network.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="epochs between two lines")
    parser.add_argument("--dir", default=None, help="where metrics and checkpoints go; nowhere by default")
    args = parser.parse_args()

    images = torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.float32) / 16  # (1797, 64) in 0..1
    with instep.Run(global_batch=64, micro_batch=16, seed=0, dir=args.dir) as run:
        generator = nn.Sequential(layers(NOISE, 128, 128, 64), nn.Sigmoid())
        critic = layers(64, 128, 64, 1)
        generator_optimizer = torch.optim.AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
        critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
        run.prepare(generator, generator_optimizer)
        run.prepare(critic, critic_optimizer)
        train = run.loader(TensorDataset(images), shuffle=True, drop_last=True)
        run.restore()

        for step in run.steps(train, epochs=args.epochs):
            for (real,) in step:
                fake = generator(torch.randn(len(real), NOISE, device=run.device)).detach()
                loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
                step.backward(loss, optimizer=critic_optimizer)
            step.update(critic_optimizer)
            critic_loss = step.loss
            for (real,) in step:
                fake = generator(torch.randn(len(real), NOISE, device=run.device))
                step.backward(F.softplus(-critic(fake)).mean(), optimizer=generator_optimizer)
            step.update(generator_optimizer)
            if step.ends_epoch and (step.epoch + 1) % args.every == 0:
                run.print(f"epoch {step.epoch}: critic {critic_loss:.4f}, generator {step.loss:.4f}")

        if run.is_main:
            with torch.no_grad():
                print(draw(generator(torch.randn(1, NOISE, device=run.device))))


if __name__ == "__main__":
    main()

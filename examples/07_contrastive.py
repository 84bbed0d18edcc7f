"""Contrastive learning: a loss over all pairs of the global batch, on any number of processes.

    instep run -n 2 examples/07_contrastive.py

Needs scikit-learn. Two noisy views of each digit should meet and stay apart from the views of all others (SimCLR, Chen
and others 2020). `step.all_rows(fn)` gives fn's rows for the whole global batch, in sample order and with gradients, so
that the loss has as many negatives as the global batch has images, while a process never holds more activations than
one micro-batch needs.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import instep


def view(images: torch.Tensor) -> torch.Tensor:
    """A random view of each image (n, 1, 8, 8): moved by up to one pixel, dimmed, with noise."""
    count = len(images)
    angle = torch.empty(count, device=images.device).uniform_(-0.25, 0.25)
    move = torch.empty(count, 2, device=images.device).uniform_(-0.25, 0.25)
    turn = torch.stack([angle.cos(), -angle.sin(), move[:, 0], angle.sin(), angle.cos(), move[:, 1]], 1).view(-1, 2, 3)
    moved = F.grid_sample(images, F.affine_grid(turn, list(images.shape), align_corners=False), align_corners=False)
    return moved * torch.empty(count, 1, 1, 1, device=images.device).uniform_(0.7, 1.3) + 0.1 * torch.randn_like(moved)


def pair_loss(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Each row of `first` has to find its partner among all rows of `second`, and the other way round."""
    likeness = first @ second.T / 0.2  # (samples, samples)
    partner = torch.arange(len(first), device=first.device)
    return 0.5 * (F.cross_entropy(likeness, partner) + F.cross_entropy(likeness.T, partner))


def nearest_neighbour_accuracy(
    run: instep.Run, encoder: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> float:
    """How often the nearest of the first 1437 images in code space shows the digit of one of the last 360."""
    encoder.eval()
    with torch.no_grad():
        codes = F.normalize(encoder(images.to(run.device))).cpu()
    encoder.train()
    nearest = (codes[1437:] @ codes[:1437].T).argmax(1)
    return float((labels[nearest] == labels[1437:]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits told apart without their labels.")
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()

    pixels, answers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(answers)
    with instep.Run(global_batch=128, micro_batch=32, seed=0) as run:
        encoder = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 32)),
        )
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
        run.prepare(encoder, optimizer)
        train = run.loader(TensorDataset(images[:1437]), shuffle=True, drop_last=True)

        def two_codes(batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            first, second = (F.normalize(encoder(view(batch[0]))) for _ in range(2))
            return first, second

        run.print(f"before: accuracy {nearest_neighbour_accuracy(run, encoder, images, labels):.4f}")

        for step in run.steps(train, epochs=args.epochs):
            first, second = step.all_rows(two_codes)  # each (128, 32), on every process
            step.backward(pair_loss(first, second))
            step.update()
            if step.ends_epoch:
                run.print(f"epoch {step.epoch}: loss {step.loss:.4f}")
        run.print(f"after: accuracy {nearest_neighbour_accuracy(run, encoder, images, labels):.4f}")


if __name__ == "__main__":
    main()

"""A small convolutional network learns scikit-learn's handwritten digits.

    python examples/01_digits.py                     one process
    instep run -n 2 examples/01_digits.py            two, with the same numbers

Needs scikit-learn. About ten seconds on two cores; test accuracy 0.98.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import instep


def digits() -> tuple[Dataset, Dataset]:
    """1437 images to learn from and 360 to test on: (1, 8, 8) in 0..1, and the digit."""
    pixels, answers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(answers)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with a convolutional network.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dir", default=None, help="where metrics and checkpoints go; nowhere by default")
    args = parser.parse_args()

    with instep.Run(global_batch=64, micro_batch=16, seed=0, dir=args.dir) as run:
        train_set, test_set = digits()
        model = convnet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        train, test = run.loader(train_set, shuffle=True, drop_last=True), run.loader(test_set)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=len(train) * args.epochs + 1)
        run.prepare(model, optimizer, schedule)
        run.restore()

        for step in run.steps(train, epochs=args.epochs):
            for images, labels in step:
                step.backward(F.cross_entropy(model(images), labels))
            step.update()
            if step.ends_epoch:
                accuracy = torch.zeros(())
                for images, labels in run.evaluate(test):
                    accuracy += (model(images).argmax(1) == labels).sum().cpu()
                run.print(f"epoch {step.epoch}: loss {step.loss:.4f}, test accuracy {run.sum(accuracy) / 360:.4f}")


if __name__ == "__main__":
    main()

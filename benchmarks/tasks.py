"""What the benchmarks train: a model, data and a loss each, the same for every variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class Task:
    """global_batch: samples per step over all ranks; each rank runs its share as one micro-batch, as all variants can.

    shuffled: in random order, each variant as it likes; else in the data set's order, and all see the same losses.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Dataset
    loss: Callable[[Tensor, Tensor], Tensor]
    global_batch: int
    shuffled: bool
    learning_rate: float = 1e-3

    def model(self) -> nn.Module:
        """A fresh model; the same weights at each call."""
        torch.manual_seed(0)
        return self.build()


def tiny() -> Task:
    """64-64-10 on scikit-learn's digits: so little work that what a step costs is the loop around it."""
    from sklearn.datasets import load_digits

    pixels, answers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(answers)
    data = TensorDataset(images[:1408], labels[:1408])  # 22 steps of 64
    return Task("tiny", tiny_mlp, data, F.cross_entropy, 64, shuffled=True)


def tiny_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def gpt() -> Task:
    """10.8 M parameters, 4 sequences of 64 tokens per rank."""
    data = torch.randint(256, (64, 65), generator=torch.Generator().manual_seed(1))
    return Task("gpt", GPT, TensorDataset(data[:, :-1], data[:, 1:]), token_loss, 8, shuffled=False, learning_rate=3e-4)


def mlp() -> Task:
    """25 M parameters, 16 samples per rank: little arithmetic for many gradients."""
    images = torch.randn(256, 2500, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(10, (256,), generator=torch.Generator().manual_seed(2))
    data = TensorDataset(images, labels)
    return Task("mlp", wide_mlp, data, F.cross_entropy, 32, shuffled=False, learning_rate=1e-4)


def wide_mlp() -> nn.Module:
    hidden = [part for _ in range(4) for part in (nn.Linear(2500, 2500), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2500, 10))


def conv() -> Task:
    """1.2 M parameters with batch norm, 16 images of 32 x 32 per rank."""
    images = torch.randn(256, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(10, (256,), generator=torch.Generator().manual_seed(2))
    return Task("conv", convnet, TensorDataset(images, labels), F.cross_entropy, 32, shuffled=False)


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside, stride in ((3, 64, 1), (64, 128, 2), (128, 256, 2), (256, 320, 2)):
        layers += [nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(320, 10))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Queries, keys and values lie head by head in one layer, so that a share of its outputs is a share of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = qkv.permute(3, 0, 2, 1, 4)  # each (batch, heads, length, width of a head)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 384, depth: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions.weight)))


TASKS = {"tiny": tiny, "gpt": gpt, "mlp": mlp, "conv": conv}

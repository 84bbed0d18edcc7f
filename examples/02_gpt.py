"""A small GPT learns to write Python from the source files of Python's own standard library.

    instep run -n 2 examples/02_gpt.py

Three million parameters, four minutes on two cores. Stop it at any moment and start it again, on any number of
processes: it continues where it was, to the same weights.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import instep

CONTEXT = 128  # tokens the model looks back on
HELD_OUT = 20  # every 20th file is kept for the held-out loss
PIECES = re.compile(r" ?\w+| ?[^\s\w]+|\n *| +|\s")  # what a token never crosses


def read_sources(most_bytes: int) -> tuple[str, str]:
    """Source text of the standard library to train on, and that of every 20th file to test on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data", "idlelib", "__pycache__"}
    files = (path for path in sorted(root.rglob("*.py")) if not skip & set(path.relative_to(root).parts))
    train, held_out, size = [], [], 0
    for index, path in enumerate(files):
        text = path.read_text(encoding="utf-8", errors="ignore")
        (train if index % HELD_OUT else held_out).append(text)
        size += len(text)
        if size >= most_bytes:
            break
    return "\n".join(train), "\n".join(held_out)


class Tokenizer:
    """Byte-pair encoding: 256 bytes and the pairs that occur most often, merged one after another."""

    def __init__(self, text: str, size: int) -> None:
        self.bytes = [bytes([value]) for value in range(256)]
        self.ranks: dict[tuple[int, int], int] = {}
        self.cache: dict[str, list[int]] = {}
        words = Counter(PIECES.findall(text))
        spelled = [(list(word.encode()), count) for word, count in sorted(words.items())]
        pairs: Counter[tuple[int, int]] = Counter()
        users: dict[tuple[int, int], set[int]] = {}
        for number, (word, count) in enumerate(spelled):
            for pair in pairwise(word):
                pairs[pair] += count
                users.setdefault(pair, set()).add(number)
        for token in range(256, size):
            best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
            if best is None or pairs[best] < 2:
                break
            self.ranks[best] = token
            self.bytes.append(self.bytes[best[0]] + self.bytes[best[1]])
            for number in users.pop(best):
                word, count = spelled[number]
                for pair in pairwise(word):
                    pairs[pair] -= count
                word[:] = merge(word, best, token)
                for pair in pairwise(word):
                    pairs[pair] += count
                    users.setdefault(pair, set()).add(number)
            del pairs[best]

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([token for piece in PIECES.findall(text) for token in self.encode_piece(piece)])

    def encode_piece(self, piece: str) -> list[int]:
        if piece not in self.cache:
            word = list(piece.encode())
            while known := [pair for pair in pairwise(word) if pair in self.ranks]:
                first = min(known, key=self.ranks.__getitem__)
                word = merge(word, first, self.ranks[first])
            self.cache[piece] = word
        return self.cache[piece]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.bytes[token] for token in tokens).decode("utf-8", errors="replace")


def merge(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
    merged, index = [], 0
    while index < len(word):
        found = tuple(word[index : index + 2]) == pair
        merged.append(token if found else word[index])
        index += 2 if found else 1
    return merged


class Windows(Dataset):
    """Stretches of CONTEXT tokens, one after another, and the same shifted by one."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.05))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head_width))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    tp_plan: ClassVar = {  # how layers are split where ranks share them: instep run -n 2 --set parallel=tensor ...
        "blocks.*.qkv": "colwise_qkv",
        "blocks.*.out": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "tokens": "embedding_rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        for block in self.blocks:  # each block begins as the identity, which learns faster in few steps
            nn.init.zeros_(block.out.weight)
            nn.init.zeros_(block.mlp[2].weight)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # (batch, length, vocabulary)

    @torch.no_grad()
    def write(self, tokens: torch.Tensor, count: int, temperature: float = 0.7) -> torch.Tensor:
        """tokens (1, length) and `count` more, drawn one by one."""
        self.eval()
        for _ in range(count):
            logits = self(tokens[:, -CONTEXT:])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        self.train()
        return tokens


def held_out_loss(run: instep.Run, model: nn.Module, loader) -> float:
    """Mean loss over the held-out tokens; each counts once, however many processes share them."""
    total, count = torch.zeros((), device=run.device), 0
    for inputs, targets in run.evaluate(loader):
        total += F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        count += targets.numel()
    return float(run.mean(total / max(count, 1), count))


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT on the sources of Python's standard library.")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--text-kb", type=int, default=4000, help="how much source text to use")
    parser.add_argument("--vocabulary", type=int, default=1536, help="tokens: bytes and frequent sequences of them")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dir", default="runs/gpt")
    args = parser.parse_args()

    train_text, test_text = read_sources(args.text_kb * 1000)
    tokenizer = Tokenizer(train_text[:1_000_000], args.vocabulary)
    train_set, test_set = Windows(tokenizer.encode(train_text)), Windows(tokenizer.encode(test_text)[:20_000])

    with instep.Run(global_batch=8, micro_batch=2, clip_norm=1.0, seed=0, dir=args.dir, checkpoint_every=200) as run:
        model = GPT(len(tokenizer.bytes), args.width, depth=3, heads=8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=30)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        schedule = torch.optim.lr_scheduler.ChainedScheduler([warm_up, cosine])
        run.prepare(model, optimizer, schedule)
        train, test = run.loader(train_set, shuffle=True), run.loader(test_set)
        size = sum(parameter.numel() for parameter in model.parameters())
        run.print(
            f"{size / 1e6:.1f} M parameters, {len(train_set) * CONTEXT:,} tokens of {len(train_text):,} characters"
        )
        run.restore()

        for step in run.steps(train, steps=args.steps):
            for inputs, targets in step:
                step.backward(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
            step.update()
            if step.index % 200 == 199 or step.index == args.steps - 1:
                loss = held_out_loss(run, model, test)
                run.log(held_out_loss=loss)
                run.print(f"step {step.index + 1}: train loss {step.loss:.3f}, held-out loss {loss:.3f} per token")
        run.save()
        prompt = tokenizer.encode("class Queue:\n    def __init__(self").to(run.device)
        written = model.write(prompt[None], 200)[0].tolist()  # on every rank: they may share the model
        run.print("-" * 80, tokenizer.decode(written), "-" * 80, sep="\n")
        run.print(f"run directory: {args.dir} (metrics, checkpoints)")


if __name__ == "__main__":
    main()

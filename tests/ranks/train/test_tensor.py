"""Layers split along the tensor axis against one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import instep
from instep.train.reduce.local_part import local_part
from run_ranks import run_ranks
from scenarios import CLASSES, FEATURES, Branches, Tied, adam, contrastive, data, result, supervised, two_calls

TOLERANCE = 1e-9  # float64, a few steps


class Encoder(nn.Module):
    """nn.TransformerEncoder with dropout everywhere, and a padding mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.into = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.2, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        padding = x > 1.2
        padding[:, 0] = False
        rows = self.encoder(self.into(x[..., None]), src_key_padding_mask=padding)
        return self.out(rows.masked_fill(padding[..., None], 0).mean(1))  # PyTorch's fast path has zeros there, too


class Decoder(nn.Module):
    """Cross-attention, a causal mask, lengths first, weights that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(1, 8)
        self.layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0)
        self.look = nn.MultiheadAttention(8, 4, kdim=4, vdim=4, bias=False)
        self.out = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x.T[..., None])  # (length, batch, 8)
        mask = nn.Transformer.generate_square_subsequent_mask(FEATURES, dtype=h.dtype)
        h = self.layer(h, h.flip(0), tgt_mask=mask)
        looked, weights = self.look(h, h[..., :4], h[..., 4:])
        return self.out(looked.mean(0) + weights.std())


def words(x: Tensor) -> Tensor:
    return (x.abs() * 7).long().clamp(max=23)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
        self.double()
        self._tp_plan = {f"model.{key}": value for key, value in (self.model._tp_plan or {}).items()}

    def forward(self, x: Tensor) -> Tensor:
        return self.model(words(x)).logits[:, -1, :CLASSES]


class GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=8, n_embd=16, n_layer=2, n_head=4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(words(x)).logits[:, -1, :CLASSES]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "encoder, norm first": lambda: Encoder(norm_first=True, activation="gelu", bias=False),
    "decoder": Decoder,
    "llama": Llama,
    "gpt2": GPT2,
}
SPLITS = {
    "2 of a layer": instep.Parallel(tensor=2),
    "2 copies": instep.Parallel(tensor=2, replicate=2),
    "2 shards": instep.Parallel(tensor=2, shard=2),
    "stretches": instep.Parallel(tensor=2, sequence=True),
}


def train(rank: int, size: int, name: str, parallel: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    with instep.Run(global_batch=16, micro_batch=2, clip_norm=0.5, parallel=parallel) as run:
        model = MODELS[name]()
        optimizer = adam(model)
        run.prepare(model, optimizer)
        loader, test = run.loader(data(40), shuffle=True), run.loader(data(21))
        history: list[Any] = []
        for step in run.steps(loader, epochs=1):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            step.update()
            history.append((step.index, step.loss, step.grad_norm))
        values = [(float(F.cross_entropy(model(x), y)), len(y)) for x, y in run.evaluate(test)]
        history.append((run.mean([v for v, _ in values], [n for _, n in values]), run.sum(len(values))))
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in MODELS[name]().parameters())
        held = sum(local_part(p).numel() for p in model.parameters())
        return {**result(run, history, model), "held": held}


@cache
def alone(name: str) -> dict[str, Any]:
    return run_ranks(train, 1, name, "ddp")[0]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("encoder", "2 copies"),
        ("encoder, norm first", "2 of a layer"),
        ("decoder", "2 of a layer"),
        ("llama", "2 shards"),
        ("gpt2", "2 of a layer"),
        ("encoder, norm first", "stretches"),
        ("gpt2", "stretches"),
    ],
)
def test_trains_as_one_process_does(name: str, split: str) -> None:
    parallel = SPLITS[split]
    expected = alone(name)
    for rank in run_ranks(train, 4 if split in ("2 copies", "2 shards") else 2, name, parallel):
        for there, here in zip(expected["history"], rank["history"], strict=True):
            assert here == pytest.approx(there, rel=TOLERANCE)
        for key, value in expected["state"].items():
            torch.testing.assert_close(rank["state"][key], value, rtol=TOLERANCE, atol=TOLERANCE, msg=key)
        assert rank["held"] < 0.8 * expected["held"]


def own_plan(**split: Any) -> dict[str, Any]:
    """A plan in PyTorch's terms, and layers that it leaves whole."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return supervised(**{**split, "parallel": instep.Parallel(tensor=2, plan=plan)} if split else {})


def split_loss(**split: Any) -> dict[str, Any]:
    return supervised(Tied, **{**split, "parallel": instep.Parallel(tensor=2, split_loss="out")} if split else {})


LOOPS: dict[str, Callable[..., dict[str, Any]]] = {
    "several calls": lambda **split: supervised(loss_of=two_calls, **split),
    "unused parameters": lambda **split: supervised(Branches, micro_batch=1, **split),
    "rows": contrastive,
    "own plan": own_plan,
    "split loss": split_loss,
}


def loop(rank: int, size: int, name: str) -> dict[str, Any]:
    return LOOPS[name](**{} if size == 1 else {"parallel": "tensor"})


@pytest.mark.parametrize("name", LOOPS)
def test_takes_every_loop_that_ddp_takes(name: str) -> None:
    expected = run_ranks(loop, 1, name)[0]
    for rank in run_ranks(loop, 2, name):
        for there, here in zip(expected["history"], rank["history"], strict=True):
            assert here == pytest.approx(there, rel=TOLERANCE)
        for key, value in expected["state"].items():
            torch.testing.assert_close(rank["state"][key], value, rtol=TOLERANCE, atol=TOLERANCE, msg=key)


def refused(rank: int, size: int) -> list[str]:
    """What cannot be, said on every rank."""
    texts = []
    with instep.Run(global_batch=16, micro_batch=2) as run:
        kept = run.loader(data())
        with pytest.raises(instep.UsageError) as late:
            run.prepare(Tied(), parallel=instep.Parallel(tensor=2))
        texts.append(str(late.value))
        assert kept is not None
    with instep.Run(global_batch=16, micro_batch=2) as run:
        model, _ = run.prepare(model := Tied(), adam(model), parallel=instep.Parallel(tensor=2, split_loss=True))
        assert run.loader(data()) is not None and len(run.gather(0)) == 1
        with pytest.raises(instep.UsageError) as wrong_head:
            model(data()[:2][0])
        texts.append(str(wrong_head.value))
    return texts


def test_says_what_cannot_be() -> None:
    late, wrong_head = run_ranks(refused, 2)[0]
    assert late == (
        "run.prepare(parallel=tensor=2) gives each micro-batch to 2 ranks, and this run's models and loaders were made for 1. Give "
        "the split to instep.Run(parallel=...), which holds for all of them."
    )
    assert wrong_head.startswith("a layer got a DTensor of shape (2, 6), whose parts split_loss leaves on their ranks")

"""A recomputed block gives the numbers of a plain one, to the bit, and leaves no trace of its second run."""

from __future__ import annotations

import copy
import pickle
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import instep
from instep.train import seeds
from instep.train.techniques.recompute import read_recompute, recompute_block, recompute_blocks
from instep.train.techniques.selective import choose, expensive_operators


class Noisy(nn.Module):
    """Draws from every generator, normalises over the batch, keeps a count and a normalised weight in buffers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5)
        self.down = spectral_norm(nn.Linear(width, width))
        self.register_buffer("seen", torch.zeros(()))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.seen += x.shape[0]
        scale = random.random() + np.random.random()
        hidden = self.drop(torch.tanh(self.norm(self.up(x)))) * (1 + self.seen) * scale
        return x + self.down(hidden)


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Noisy(), Noisy(), Noisy())


def train(model: nn.Module, times: int = 2) -> list[Tensor]:
    """Everything that a recomputation could change: gradients, buffers, what is drawn afterwards."""
    seeds.set_generators(1, 2, 3)
    for _ in range(times):
        x = torch.randn(5, 8)
        model(x).square().mean().backward()
    drawn = torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])
    return [*(p.grad for p in model.parameters()), *model.buffers(), drawn]  # type: ignore[list-item]


@pytest.mark.parametrize("how", [1, 2, "selective"])
def test_gradients_buffers_and_later_draws_are_the_same_bits(how: Any) -> None:
    plain, again = make(), make()
    recompute_blocks(again, how)
    for expected, found in zip(train(plain), train(again), strict=True):
        assert torch.equal(expected, found)
    assert plain[2].runs == 2  # and that blocks did run twice
    assert [block.runs for block in again[1:]] == [4, 2 if how == 2 else 4, 4]


def test_a_graph_can_be_gone_through_twice() -> None:
    results = []
    for model in (make(), make()):
        if results:
            recompute_blocks(model, 1)
        seeds.set_generators(4)
        loss = model(torch.randn(5, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_nothing_runs_twice_without_gradients() -> None:
    model = make()
    recompute_blocks(model, 1)
    with torch.no_grad():
        model(torch.randn(5, 8))
    assert [block.runs for block in model[1:]] == [1, 1, 1]


def test_copies_have_blocks_of_their_own() -> None:
    model = make()
    recompute_blocks(model, 1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[1].up.weight.zero_()
    other(torch.randn(5, 8)).sum().backward()
    assert model[1].up.weight.grad is None and other[1].up.weight.grad is not None
    assert not torch.equal(model[1].up.weight, other[1].up.weight)
    assert model.state_dict().keys() == make().state_dict().keys()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def test_a_recomputed_block_can_be_pickled() -> None:
    block = Plain()
    recompute_block(block)
    other = pickle.loads(pickle.dumps(block))
    x = torch.randn(2, 4)
    assert torch.equal(block(x), other(x))


class SometimesWrites(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.last.copy_(x[0].detach())
        return super().forward(x)


def test_a_buffer_that_is_written_at_times_only_is_named() -> None:
    block = SometimesWrites()
    recompute_block(block)
    block(torch.randn(2, 4)).sum().backward()
    with pytest.raises(
        instep.UsageError,
        match=re.escape(
            "recompute cannot run SometimesWrites a second time to the same numbers: it writes its buffer last in some "
            "forwards only. Leave recompute out."
        ),
    ):
        block(torch.randn(2, 4))


def test_a_model_without_blocks_is_named() -> None:
    with pytest.raises(
        instep.UsageError, match=r"recompute=1 found no block in Linear: blocks are members of a ModuleLi"
    ):
        recompute_blocks(nn.Linear(2, 2), 1)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, None), ("none", None), ("blocks", 1), (3, 3), ("selective", "selective")]
)
def test_reads(value: Any, expected: Any) -> None:
    assert read_recompute(value) == expected


@pytest.mark.parametrize("value", ["all", 0, True, -1, 1.5])
def test_refuses_in_one_sentence(value: Any) -> None:
    with pytest.raises(
        instep.UsageError,
        match=re.escape(
            f"recompute={value!r} is not possible. Allowed: 'blocks' (all), a whole number k (every k-th block), "
            "'selective' (all, but matrix products and attention are kept), 'none', or None."
        ),
    ):
        read_recompute(value)


def test_selective_keeps_products_and_runs_what_draws_again() -> None:
    aten = torch.ops.aten
    x = torch.empty(0)
    assert {aten.mm.default, aten.addmm.default, aten.bmm.default} <= expensive_operators()
    flash = aten._scaled_dot_product_flash_attention.default  # private names: this test notices when they change
    assert flash in expensive_operators()
    assert choose(None, flash, x, x, x, 0.0).name == "MUST_SAVE"
    assert choose(None, flash, x, x, x, 0.1).name == "PREFER_RECOMPUTE"
    assert choose(None, flash, x, x, x).name == "MUST_SAVE"
    assert choose(None, aten.tanh.default, x).name == "PREFER_RECOMPUTE"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_hugging_face_train_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=1)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=32
        )
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(1))
    gradients = []
    for how in (None, 1):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        if how:
            recompute_blocks(model, how)
        seeds.set_generators(5)
        cached = (
            {} if how else {"use_cache": False}
        )  # recomputed blocks get none, which changes the order of sums in GPT-2
        model(input_ids=tokens, labels=tokens, **cached).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_filled_cache_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=32
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    past = transformers.DynamicCache(config=config)
    for layer in range(2):
        past.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), layer)
    recompute_blocks(model, 1)
    with pytest.raises(instep.UsageError, match="one got a DynamicCache that holds 3 positions already"):
        model.model.layers[0](torch.zeros(1, 3, 16), past_key_values=past)

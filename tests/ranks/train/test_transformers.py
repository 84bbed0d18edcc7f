"""Models of transformers in every kind of split against one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from run_ranks import run_ranks
from scenarios import CLASSES, adam, data, whole

TOLERANCE = 1e-9
SIZES: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 16}


def words(x: Tensor) -> Tensor:
    return (x.abs() * 7).long().clamp(max=23)


class Model(nn.Module):
    """One of transformers', small and with random weights, that gives numbers for a few classes."""

    def __init__(self, kind: str) -> None:
        import transformers as hf

        super().__init__()
        makers: dict[str, Callable[[], nn.Module]] = {
            "llama": lambda: hf.LlamaForCausalLM(
                hf.LlamaConfig(**SIZES, **HEADS, num_key_value_heads=2, attention_dropout=0.1)
            ),
            "qwen2": lambda: hf.Qwen2ForCausalLM(
                hf.Qwen2Config(**SIZES, **HEADS, num_key_value_heads=2, tie_word_embeddings=True)
            ),
            "mistral": lambda: hf.MistralForCausalLM(
                hf.MistralConfig(**SIZES, **HEADS, num_key_value_heads=2, sliding_window=4)
            ),
            "gpt2": lambda: hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=24, n_positions=8, n_embd=16, n_layer=2, n_head=4)
            ),
            "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES, **HEADS, hidden_dropout=0.1)),
            "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, **HEADS)),
            "t5": lambda: hf.T5ForConditionalGeneration(
                hf.T5Config(vocab_size=24, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
            ),
            "vit": lambda: hf.ViTForImageClassification(
                hf.ViTConfig(
                    hidden_size=16,
                    intermediate_size=24,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    image_size=4,
                    patch_size=2,
                    num_labels=CLASSES,  # type: ignore[call-arg]  # of the configuration's parent
                    hidden_dropout_prob=0.1,
                )
            ),
        }
        self.kind, self.model = kind, makers[kind]()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "vit":
            return self.model(x.repeat(1, 8).view(-1, 3, 4, 4)).logits
        inputs = {"decoder_input_ids": words(x).flip(1)} if self.kind == "t5" else {}
        return self.model(words(x), **inputs).logits[:, -1, :CLASSES]


def train(kind: str, parallel: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    with instep.Run(global_batch=16, micro_batch=2, clip_norm=0.5, parallel=parallel) as run:
        model = Model(kind)
        optimizer = adam(model)
        run.prepare(model, optimizer)
        history: list[Any] = []
        for step in run.steps(run.loader(data(40), shuffle=True), epochs=1):
            step.forward_backward(model, F.cross_entropy)
            step.update()
            history.append((step.index, step.loss, step.grad_norm))
        state = {key: whole(value).clone() for key, value in model.state_dict().items() if not value.is_meta}
        return {"history": history, "state": state}


def play(rank: int, size: int, kinds: list[str], parallel: Any) -> dict[str, Any]:
    return {kind: train(kind, parallel) for kind in kinds}


@cache
def alone(kinds: tuple[str, ...]) -> dict[str, Any]:
    return run_ranks(play, 1, list(kinds), "ddp")[0]


KINDS = ["llama", "qwen2", "mistral", "gpt2", "gpt_neox", "bert", "t5", "vit"]
DECODERS = ["llama", "qwen2", "mistral", "gpt2", "gpt_neox"]
P = instep.Parallel
ROWS: list[tuple[int, Any, list[str]]] = [
    (2, P(tensor=2, sequence=True), ["bert", "t5"]),
    (2, P(pipeline=2, schedule="zbv"), ["t5"]),  # an encoder's output, and a learned bias, that every layer is given
]
SLOW_ROWS: list[tuple[int, Any, list[str]]] = [
    (2, P(tensor=2), KINDS),
    (2, P(tensor=2, sequence=True), DECODERS),
    (2, "zero3", KINDS),
    (2, P(pipeline=2), KINDS),
    (2, P(pipeline=2, schedule="zbv"), KINDS),
    (4, P(shard=2, tensor=2), KINDS),
]


def check_row(size: int, parallel: Any, kinds: list[str]) -> None:
    for rank in run_ranks(play, size, kinds, parallel):
        for kind in kinds:
            expected = alone(tuple(kinds))[kind]
            for there, here in zip(expected["history"], rank[kind]["history"], strict=True):
                assert here == pytest.approx(there, rel=TOLERANCE), kind
            for key, value in rank[kind]["state"].items():
                torch.testing.assert_close(
                    value, expected["state"][key], rtol=TOLERANCE, atol=TOLERANCE, msg=f"{kind}: {key}"
                )


def name_of(row: tuple[int, Any, list[str]]) -> str:
    return row[1] if isinstance(row[1], str) else row[1].describe() + ", sequence" * row[1].sequence


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_trains_as_one_process_does(row: Any) -> None:
    check_row(*row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW_ROWS, ids=name_of)
def test_trains_as_one_process_does_in_rarer_splits(row: Any) -> None:
    check_row(*row)


def refuse(rank: int, size: int) -> str:
    with instep.Run(global_batch=16, micro_batch=2, parallel=P(tensor=2, sequence=True)) as run:
        model = Model("vit")
        run.prepare(model, adam(model))
        with pytest.raises(instep.UsageError) as caught:
            model(torch.zeros(2, 6, dtype=torch.float64))
        return str(caught.value)


@pytest.mark.slow
def test_stretches_of_an_odd_length_are_refused_in_training() -> None:
    assert run_ranks(refuse, 2)[0].startswith("a sequence of 5 cannot be cut in 2 equal stretches")

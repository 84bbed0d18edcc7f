"""Which layers are split along the tensor axis, and what is refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel

import instep
from instep.records.parallel import Parallel, read_parallel
from instep.train.techniques.tensor.attention import Heads
from instep.train.techniques.tensor.plan import find_plan, fits
from instep.train.techniques.tensor.regions import draws
from instep.train.techniques.tensor.sequence import check_length, find_stacks, plan_sequence
from instep.train.techniques.tensor.split import (
    check_divides,
    check_heads,
    check_partner,
    check_splittable,
    find_head,
    find_ties,
    settle_ties,
    split_owners,
)
from instep.train.techniques.tensor.styles import Columns


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 6))


def shown(model: nn.Module, degree: int = 2, plan: Any = None) -> dict[str, str]:
    return {name: repr(style) for name, style in find_plan(model, plan, degree).items()}


def test_pairs_layers_where_only_elements_lie_between() -> None:
    assert shown(sequence()) == {
        "0": "Columns(parts=1, gathered=False)",
        "3": "Rows(whole_input=False)",
        "5": "Columns(parts=1, gathered=True)",
    }


def test_knows_the_transformer_layers() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    plan = shown(model)
    assert plan["encoder.layers.0.self_attn"] == plan["decoder.layers.0.multihead_attn"] == "Heads()"
    assert plan["decoder.layers.0.linear2"] == "Rows(whole_input=False)"
    assert not any("out_proj" in name for name in plan)


def test_an_embedding_follows_the_head_that_it_is_tied_to() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 4), "places": nn.Embedding(8, 4), "head": nn.Linear(4, 8, False)})
    model["head"].weight = model["tokens"].weight
    assert shown(model) == {"head": "Columns(parts=1, gathered=True)", "tokens": "Vocabulary()"}


class Own(nn.Module):
    tp_plan: ClassVar[dict[str, str]] = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2))


def test_a_models_own_plan_comes_before_what_is_recognised() -> None:
    assert list(shown(Own())) == ["layers.0.up", "layers.1.up", "layers.0.down", "layers.1.down"]
    assert shown(Own(), plan={"layers.0.up": "rowwise"}) == {"layers.0.up": "Rows(whole_input=False)"}


def test_a_part_of_a_model_brings_its_own_plan() -> None:
    model = nn.ModuleDict({"body": Own(), "head": nn.Linear(4, 6)})
    assert list(shown(model))[1:] == ["body.layers.1.up", "body.layers.0.down", "body.layers.1.down", "head"]


def test_what_stays_whole_takes_its_partners_along() -> None:
    assert shown(Own(), plan={"layers.0.up": "whole"}) == {
        "layers.1.up": "Columns(parts=1, gathered=False)",
        "layers.1.down": "Rows(whole_input=False)",
        "layers.0.up": "Whole()",
    }
    kept = shown(sequence(), plan={"3": "whole"})
    assert kept == {"0": "Columns(parts=1, gathered=True)", "5": "Columns(parts=1, gathered=True)", "3": "Whole()"}
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4))
    assert shown(convolution, plan={"0": "whole"}) == {"2": "Columns(parts=1, gathered=True)", "0": "Whole()"}
    with pytest.raises(instep.UsageError, match="ModuleDict has no layer that tensor=2 could split"):
        find_plan(nn.ModuleDict({"body": Own()}), {"body": "whole"}, 2)


class Attention(nn.Module):
    """As in T5."""

    __module__ = "transformers.models.any"

    def __init__(self, *beside: str) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", *beside):
            self.add_module(name, nn.Linear(8, 8))
        self.relative_attention_bias = nn.Embedding(6, 4)


class Feed(nn.Module):
    __module__ = "transformers.models.any"

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.wi, self.between, self.wo = nn.Linear(8, 16), between, nn.Linear(16, 8)


class Crossed(nn.Module):
    """As in BERT: what brings the heads together lies in another module."""

    __module__ = "transformers.models.any"

    def __init__(self) -> None:
        super().__init__()
        parts = {name: nn.Linear(8, 8) for name in ("query", "key", "value")}
        self.add_module("self", nn.ModuleDict({**parts, "dropout": nn.Dropout(0.1)}))
        self.output = nn.ModuleDict({"dense": nn.Linear(8, 8), "LayerNorm": nn.LayerNorm(8)})


def test_knows_attention_of_transformers_by_its_parts() -> None:
    alone = "Columns(parts=1, gathered=True)"
    assert shown(Attention()) == {
        **dict.fromkeys("qkv", "Columns(parts=1, gathered=False)"),
        "o": "Rows(whole_input=False)",
        "relative_attention_bias": "Features()",
    }
    assert shown(Attention("q_norm")) == dict.fromkeys(("q", "k", "v", "o", "q_norm"), alone)
    assert shown(Crossed())["self.value"] == "Columns(parts=1, gathered=False)"
    assert shown(Crossed())["output.dense"] == "Rows(whole_input=False)"
    assert shown(Feed(nn.ReLU()))["wo"] == "Rows(whole_input=False)"
    assert shown(Feed(nn.LayerNorm(16))) == {"wi": alone, "wo": alone}


def test_a_convolution_that_embeds_patches_stays_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), nn.Flatten(), nn.Linear(4, 4))
    assert list(shown(model)) == ["2"]


def test_a_star_stands_for_one_part_of_a_name() -> None:
    assert fits("layers.3.up", "layers.*.up") and not fits("layers.3.mlp.up", "layers.*.up")


@pytest.mark.parametrize(
    ("model", "plan", "text"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4)),
            None,
            "no way is known to split 0, a Conv2d, along the tensor axis. Say how with Parallel(tensor=..., plan={'0': ...}), keep "
            "it whole on every rank with plan={'0': 'whole'}, or take shard= instead.",
        ),
        (
            nn.Sequential(nn.Linear(4, 3)),
            None,
            "Sequential has no layer that tensor=2 could split: none of its linear layers has a number of outputs that 2 divides.",
        ),
        (
            Own(),
            {"layers.*.upp": "colwise"},
            "Parallel(plan=...) names 'layers.*.upp', and the model has no such module.",
        ),
        (
            Own(),
            {"layers.*.up": "diagonal"},
            "Parallel(plan=...) has 'layers.*.up': 'diagonal', which is no way to split",
        ),
        (
            nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2, add_zero_attn=True)}),
            None,
            "attention is a MultiheadAttention with add_bias_kv or add_zero_attn, for which no way to split it by heads is built.",
        ),
    ],
)
def test_refuses_what_it_cannot_split_by_name(model: nn.Module, plan: Any, text: str) -> None:
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        find_plan(model, plan, 2)


def test_shares_that_no_layer_takes_are_refused() -> None:
    model = sequence()
    plan = find_plan(model, {"0": "colwise"}, 2)
    text = "the plan splits 0 by outputs and leaves each rank its share, and no layer near takes shares. Name the one that does"
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        check_partner("", plan)
    check_partner("", find_plan(model, {"0": "colwise", "3": RowwiseParallel()}, 2))
    crossed = nn.ModuleDict({"a": Crossed()})
    check_partner("a.self", find_plan(crossed, None, 2))


def test_heads_are_never_cut_in_two() -> None:
    attention = nn.MultiheadAttention(12, 6)
    text = "attention has num_heads=6, which tensor=4 does not divide: a head cannot be cut in two. Nearest that fit: tensor=2, tensor=3, tensor=6. 'zero3' and pipeline= share"
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        check_divides("attention", attention, find_plan(nn.ModuleDict({"a": attention}), None, 4)["a"], 4)


def test_a_degree_of_one_is_no_way_out() -> None:
    one_head = nn.MultiheadAttention(12, 1)
    text = (
        "attention has num_heads=1, which tensor=2 does not divide: a head cannot be cut in two. 'zero3' and pipeline= share a model "
        "out without cutting its layers; with a multiple of 2 heads it can be cut."
    )
    with pytest.raises(instep.UsageError, match=f"^{re.escape(text)}$"):
        check_divides("attention", one_head, Heads(), 2)
    text = (
        "head has 50257 outputs, which tensor=2 does not divide. Keep it whole with Parallel(tensor=2, plan={..., 'head': 'whole'}), "
        "or give it a multiple of 2 outputs."
    )
    with pytest.raises(instep.UsageError, match=f"^{re.escape(text)}$"):
        check_divides("head", nn.Linear(2, 50257), Columns(gathered=True), 2)


class Grouped(nn.Module):
    """Attention whose keys have fewer heads than its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)


def test_heads_of_keys_are_counted_by_themselves() -> None:
    model = nn.ModuleDict({"attn": Grouped()})
    plan = find_plan(model, {"attn.q_proj": "colwise", "attn.k_proj": "colwise", "attn.o_proj": "rowwise"}, 4)
    assert split_owners(model, plan) == ["attn"]
    with pytest.raises(instep.UsageError, match=re.escape("attn.k_proj has heads=2, which tensor=4 does not divide")):
        check_heads("attn", model["attn"], plan, 4)


def test_tied_layers_that_a_plan_would_part_are_refused() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["tokens"].weight
    given = {"head": "colwise_gather_output"}
    with pytest.raises(
        instep.UsageError, match=re.escape("tokens and head share one weight, and Parallel(plan=...) splits")
    ):
        settle_ties(model, find_plan(model, given, 2), find_ties(model), given, 2)


def test_tied_layers_that_nobody_splits_alike_stay_whole_with_their_partners() -> None:
    pair, tokens, head, kept = sequence(), nn.Embedding(8, 4), nn.Linear(4, 8), nn.Embedding(8, 4, sparse=True)
    model = nn.ModuleDict({"pair": pair, "tokens": tokens, "head": head, "kept": kept})
    head.weight = tokens.weight
    model.register_parameter("bias", head.bias)  # as BertForMaskedLM has it
    first: Any = pair[0]
    kept.weight = first.weight
    plan = settle_ties(model, find_plan(model, None, 2), find_ties(model), None, 2)
    assert {name: repr(style) for name, style in plan.items() if repr(style) != "Whole()"} == {
        "pair.3": "Columns(parts=1, gathered=True)",
        "pair.5": "Columns(parts=1, gathered=True)",
    }


def test_a_plan_without_a_tensor_axis_is_refused() -> None:
    with pytest.raises(
        instep.UsageError, match=re.escape("has a plan, which says how to split layers, and tensor=1 splits none")
    ):
        read_parallel(Parallel(shard=2, plan={"a": "colwise"}))


def test_the_layer_that_the_loss_goes_to_has_to_be_split() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    text = "split_loss=True wants the model's last layer split by outputs, and 2 is not"
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        find_head(model, find_plan(model, None, 2), True)
    with pytest.raises(
        instep.UsageError, match=re.escape("has split_loss=True, which is for layers that tensor= splits")
    ):
        read_parallel(Parallel(shard=2, split_loss=True))


def test_norms_between_split_pairs_work_on_stretches() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    plan = find_plan(model, None, 2)
    stacks = find_stacks(model, plan)
    plan_sequence(model, plan, stacks)
    assert stacks == [["layers.0", "layers.1"]]
    assert repr(plan["layers.1.norm2"]) == "OnShares()" and "layers.0.self_attn.out_proj" not in plan
    assert plan["layers.0.linear1"].sequence_dim == plan["layers.0.linear2"].sequence_dim == 0  # type: ignore[attr-defined]


def test_the_memory_of_a_decoder_comes_whole() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2)
    plan: Any = find_plan(model, None, 2)
    plan_sequence(model, plan, find_stacks(model, plan))
    assert plan["layers.1.multihead_attn"].memory_is_whole and not plan["layers.1.self_attn"].memory_is_whole
    assert plan["layers.1.multihead_attn"].sequence_dim == 0 and repr(plan["layers.1.norm3"]) == "OnShares()"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            sequence(),
            "sequence=True works on blocks that the model repeats, one after another, and Sequential has none",
        ),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))),
            "sequence=True needs pairs of split layers, and 0.0 is split alone, since its neighbours are not known.",
        ),
    ],
)
def test_refuses_stretches_where_it_does_not_know_enough(model: nn.Module, text: str) -> None:
    plan = find_plan(model, None, 2)
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        plan_sequence(model, plan, find_stacks(model, plan))


def test_stretches_are_equally_long() -> None:
    text = "a sequence of 127 cannot be cut in 2 equal stretches, as sequence=True does with tensor=2. Pad to a multiple of 2, such as 128"
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        check_length(127, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"exact": True},
            "exact=True adds gradients in an order of its own and goes with 'ddp' and 'zero1' only.",
        ),
        (
            {"compress": "powersgd"},
            "compress='powersgd' looks at whole matrices of gradients, of which tensor= leaves",
        ),
    ],
)
def test_names_what_does_not_go_together(arguments: dict[str, Any], text: str) -> None:
    given: Any = SimpleNamespace(**{"exact": False, "compress": None, **arguments})
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        check_splittable(given)


def test_sees_whether_a_module_draws() -> None:
    assert draws(sequence()) and not draws(nn.Linear(2, 2))
    with_number: Any = nn.Module()
    with_number.attention_dropout = 0.1
    assert draws(with_number)

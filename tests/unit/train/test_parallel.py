"""Degrees of parallelism: short names, filling, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import instep
from instep.records.parallel import Parallel, fit, read_parallel
from instep.train.techniques.shard import find_blocks


@pytest.mark.parametrize(
    ("value", "size", "expected"),
    [
        ("ddp", 4, (4, 1)),
        ("zero3", 4, (1, 4)),
        (Parallel(replicate=None, shard=2), 8, (4, 2)),
        (Parallel(replicate=2, shard=None), 8, (2, 4)),
        (Parallel(), 1, (1, 1)),
        ("replicate=2 x shard=2", 4, (2, 2)),
        ("shard,replicate=4", 8, (4, 2)),
    ],
)
def test_one_degree_fills_the_rest(value: Any, size: int, expected: tuple[int, int]) -> None:
    found = fit(read_parallel(value), size)
    assert (found.replicate, found.shard) == expected


@pytest.mark.parametrize(
    ("value", "size", "text"),
    [
        (
            Parallel(shard=3),
            8,
            "8 ranks cannot be split as shard=3 (= 3). The degrees have to multiply to the number of ranks. Nearest that fit: "
            "replicate=2 x shard=4, shard=8, replicate=4 x shard=2; or start 3 ranks. More: instep explain startup/parallel-does-not-fit",
        ),
        (
            Parallel(replicate=2, shard=3),
            8,
            "8 ranks cannot be split as replicate=2 x shard=3 (= 6). The degrees have to multiply to the number of ranks. "
            "Nearest that fit: replicate=2 x shard=4, replicate=4 x shard=2; or start 6 ranks. More: ",
        ),
        # an axis that was asked for is no axis at degree 1: copies or shards take the ranks that are left
        (
            Parallel(tensor=2),
            8,
            "Nearest that fit: replicate=4 x tensor=2, replicate=2 x shard=2 x tensor=2, shard=4 x tensor=2;",
        ),
        (
            "tensor=3,shard",
            8,
            "cannot be split as shard=rest x tensor=3 (= 3). The degrees have to multiply to the number of ranks. ",
        ),
        (
            "tensor=3,shard",
            8,
            "Nearest that fit: shard=2 x tensor=4, shard=4 x tensor=2, replicate=2 x shard=2 x tensor=2; or start 6 or 9 ranks.",
        ),
        (
            "zero1,tensor=3",
            8,
            "Nearest that fit: replicate=2 x tensor=4, replicate=4 x tensor=2, tensor=8; or start 6 or 9 ranks.",
        ),
        (
            "pipeline=2,cut=a",
            3,
            "3 ranks cannot be split as pipeline=2 (= 2). The degrees have to multiply to the number of ranks. "
            "Start 2 ranks, as `instep run -n 2` does. More: ",
        ),
        (
            Parallel(pipeline=2),
            1,
            "Start 2 ranks, as `instep run -n 2` does, or leave parallel= out, for one rank holds the model whole. More: ",
        ),
        (Parallel(), 4, "Nearest that fit: replicate=4, replicate=2 x shard=2, shard=4; or start 1 rank. More: "),
        (
            Parallel(shard=2, share_optimizer=True),
            2,
            "Parallel(share_optimizer=True, shard=2): copies that are equal after every step share their optimizer's state out, and "
            "with shard there are none. Leave one of them out.",
        ),
        (Parallel(shard=0), 2, "Parallel(shard=0): a degree is a whole number of at least 1, or None to fill."),
        (Parallel(replicate=None, shard=None), 2, "only one degree may be None"),
        (Parallel(tensor=2, sequence="yes"), 2, "Parallel(sequence='yes') has to be True or False."),  # type: ignore[arg-type]
        (
            Parallel(tensor=2, split_loss=1),  # type: ignore[arg-type]
            2,
            "Parallel(split_loss=1) has to be True, False or the name of the model's last layer.",
        ),
        (
            Parallel(tensor=2, plan=["up"]),  # type: ignore[arg-type]
            2,
            "Parallel(plan=['up']) has to map names of modules to styles, as {'layers.*.up': 'colwise'}.",
        ),
        (
            "tensor=2,sequenced",
            2,
            "parallel='tensor=2,sequenced' is not a way to split a model. Allowed: 'ddp', 'zero1'",
        ),
        ("shard=2,sequence", 2, "shard=2 has sequence=True, which is for layers that tensor= splits, and tensor is 1."),
    ],
)
def test_refuses_in_one_sentence(value: Any, size: int, text: str) -> None:
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        fit(read_parallel(value), size)


@pytest.mark.parametrize(
    ("value", "described", "written"),
    [
        ("ddp", "'ddp'", "ddp"),
        ("zero1", "'zero1'", "zero1"),
        ("shard,tensor=2", "shard=rest x tensor=2", "Parallel(shard=None, tensor=2)"),
        ("pipeline=2,schedule=zbv", "pipeline=2", "Parallel(pipeline=2, schedule='zbv')"),
        (Parallel(), "replicate=1", "Parallel()"),
    ],
)
def test_is_shown_as_one_would_write_it(value: Any, described: str, written: str) -> None:
    parallel = read_parallel(value)
    assert (parallel.describe(), parallel.write()) == (described, written)
    assert read_parallel(described.strip("'")).shard == parallel.shard


def test_options_of_the_tensor_axis_may_be_written_out() -> None:
    assert read_parallel("tensor=2,sequence,split_loss=head") == Parallel(tensor=2, sequence=True, split_loss="head")
    assert read_parallel("tensor=2,shard,sequence=true,split_loss") == Parallel(
        tensor=2, shard=None, sequence=True, split_loss=True
    )


def test_finds_the_repeated_blocks() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    blocks = nn.ModuleList([block(), block()])
    model = nn.Sequential(nn.Linear(2, 2), blocks, nn.Linear(2, 2))
    assert find_blocks(model) == list(blocks)


def test_a_block_that_shares_a_parameter_stays_with_the_root() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    blocks, head = nn.ModuleList([block(), block()]), nn.Linear(2, 2)
    blocks[0][0].weight = head.weight  # type: ignore[index]
    assert find_blocks(nn.Sequential(blocks, head)) == [blocks[1]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"exact": True}, "exact=True adds gradients in an order of its own and goes with 'ddp' and 'zero1' only."),
        ({"compress": "bf16"}, "compress='bf16' is for gradients that every rank holds whole"),
    ],
)
def test_names_what_does_not_go_together(arguments: dict[str, Any], text: str) -> None:
    from instep.train.arguments import read_arguments
    from instep.train.techniques.shard import check_shardable

    defaults = dict.fromkeys(
        ("micro_batch", "clip_norm", "clip_value", "compress", "threads", "dir", "checkpoint_every")
    )
    given = {
        **defaults,
        "global_batch": 8,
        "precision": "fp32",
        "exact": False,
        "seed": 0,
        "keep": 3,
        "parallel": "zero3",
        "recompute": None,
        "offload": False,
        "compile": False,
    }
    with pytest.raises(instep.UsageError, match=re.escape(text)):
        check_shardable(read_arguments({**given, **arguments}))


def test_shared_optimizers_may_be_written_out_with_other_axes() -> None:
    expected = Parallel(replicate=None, tensor=2, share_optimizer=True)
    assert read_parallel("tensor=2,zero1") == expected
    assert read_parallel("replicate=None,tensor=2,share_optimizer") == expected

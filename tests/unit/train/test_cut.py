"""Where a pipeline cuts a model."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import instep
from instep.records.parallel import Parallel, fit, read_parallel
from instep.train.techniques.pipeline.cut import cut_model, find_candidates, split_evenly, stages_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([Block() for _ in range(4)])
        self.norm, self.drop, self.head = nn.LayerNorm(4), nn.Dropout(0.1), nn.Linear(4, 100)


def test_a_pipeline_may_be_written_out_on_a_command_line() -> None:
    found = fit(read_parallel("pipeline=2,replicate,schedule=interleaved_1f1b,cut=a.1,cut=a.2,cut=a.3"), 4)
    assert (found.pipeline, found.replicate, found.schedule, found.cut) == (
        2,
        2,
        "interleaved_1f1b",
        ("a.1", "a.2", "a.3"),
    )


def test_finds_what_runs_one_after_the_other() -> None:
    assert find_candidates(Model()) == [*(f"body.layers.{i}" for i in range(4)), "norm", "head"]
    chain = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert find_candidates(chain) == ["2.0", "2.1", "3"]
    assert find_candidates(nn.Linear(2, 2)) == []


def test_every_tensor_is_in_the_stage_that_stands_before_it() -> None:
    stages = stages_of(Model(), ["body.layers.2", "head"])
    assert {name: stage for name, stage in stages.items() if name.endswith("weight")} == {
        "table.weight": 0,
        **{f"body.layers.{i}.{part}.weight": i // 2 for i in range(4) for part in ("up", "down")},
        "norm.weight": 1,
        "head.weight": 2,
    }


def test_the_dearest_stage_is_as_cheap_as_can_be() -> None:
    assert split_evenly([1, 1, 1, 1], 2) == [2]
    assert split_evenly([5, 1, 1, 1, 5], 3) == [1, 4]
    assert split_evenly([0, 4, 4, 4, 4], 2) == [3]
    assert split_evenly([1, 2, 3, 4, 5, 6, 7, 8, 9], 3) == [5, 7]


def test_a_table_of_embeddings_costs_memory_and_a_head_time_as_well() -> None:
    model = Model()  # costs: table 100, blocks 83 each, norm 2, head 525
    assert cut_model(model, 2, None, "pipeline=2").names == ("head",)
    assert cut_model(model, 3, None, "pipeline=3").names == ("body.layers.1", "head")
    named = cut_model(model, 2, ["norm"], "pipeline=2")
    assert named.names == ("norm",)
    assert named.count == 2


@pytest.mark.parametrize(
    ("model", "stages", "cut", "text"),
    [
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            4,
            None,
            "pipeline=4 needs 4 stages, and Sequential can be cut into 2 at most: before '1'. Either take pipeline=2 at "
            "most, or name other cut points with Parallel(cut=[...]), or take 'zero3', which cuts no model.",
        ),
        (
            nn.Linear(2, 2),
            2,
            None,
            "pipeline=2 needs 2 stages, but no parts of Linear that run one after the other were found: it has no "
            "nn.Sequential, and no nn.ModuleList of one kind of blocks. Name the modules that begin a stage, as "
            "Parallel(pipeline=2, cut=['decoder']).",
        ),
        (
            Model(),
            2,
            ["body.layers.7"],
            "Parallel(cut=['body.layers.7']): Model has no module 'body.layers.7'. It may be cut before 'body.layers.0', ",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model: nn.Module, stages: int, cut: Any, text: str) -> None:
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        cut_model(model, stages, cut, f"pipeline={stages}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            Parallel(pipeline=2, schedule="2f2b"),
            "Parallel(schedule='2f2b') is not an order to run a pipeline in. Allowed: 'gpipe', '1f1b', 'looped_bfs', ",
        ),
        (
            Parallel(pipeline=2, cut=["a", "b"]),
            "Parallel(pipeline=2, schedule='1f1b') takes 1 cut points, one less than stages; cut=['a', 'b'] has 2.",
        ),
        (
            Parallel(pipeline=2, schedule="interleaved_1f1b", cut=["a", "b"]),
            "Parallel(pipeline=2, schedule='interleaved_1f1b') takes 3 or 5 or 7 and so on cut points, one less than stages; ",
        ),
        (
            Parallel(pipeline=2, cut=[3]),  # type: ignore[list-item]
            "Parallel(cut=[3]): cut points are the names of the modules that begin a new stage",
        ),
        (Parallel(pipeline=2, cut=["a", "a"]), "Parallel(cut=['a', 'a']) names a module twice; each begins one stage."),
        (
            Parallel(cut=["a"]),
            "Parallel(cut=['a']) is for a pipeline, and pipeline is 1: give pipeline=2 or more as well.",
        ),
        (Parallel(schedule="zbv"), "Parallel(schedule='zbv') is for a pipeline, and pipeline is 1"),
        (Parallel(pipeline=None, cut=["a", "b", "c"]), "Parallel(pipeline=2, schedule='1f1b') takes 1 cut points"),
    ],
)
def test_cut_points_and_schedules_that_cannot_be_are_refused(value: Parallel, text: str) -> None:
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        fit(read_parallel(value), 2)


def test_two_stages_per_rank_are_too_many_for_a_short_model() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    text = (
        "pipeline=2 with schedule='zbv' needs 4 stages (2 per rank), and Sequential can be cut into 3 at most: before '1', '2'. "
        "Either take schedule='1f1b', which has one stage per rank, or name other cut points with Parallel(cut=[...]), or take "
        "'zero3', which cuts no model."
    )
    with pytest.raises(instep.UsageError, match=f"^{re.escape(text)}$"):
        cut_model(model, 4, None, "pipeline=2 with schedule='zbv'", per_rank=2)

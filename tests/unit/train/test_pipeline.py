"""Schedules of a pipeline: who runs which stage, what runs where a schedule cannot, and what does not go with one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

import instep
from instep.records.parallel import Parallel, read_parallel
from instep.records.schedules import SCHEDULES
from instep.train.techniques.block_options import BlockOptions
from instep.train.techniques.pipeline.carry import for_split_backward, pack
from instep.train.techniques.pipeline.last_stage import Result
from instep.train.techniques.pipeline.schedule import busy_share, choose_schedule, place_stages
from instep.train.techniques.pipeline.share_out import check_pipeline
from instep.train.techniques.pipeline.trace import Carried


def test_torch_has_every_schedule() -> None:
    for schedule in SCHEDULES.values():
        assert get_schedule_class(schedule.torch_name).__name__ == f"Schedule{schedule.torch_name}"


def test_stages_are_in_turn_or_there_and_back() -> None:
    assert place_stages("1f1b", 3, 1) == [0, 1, 2]
    assert place_stages("interleaved_1f1b", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert place_stages("zbv", 3, 2) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("1f1b", 4, "1f1b"),
        ("1f1b", 3, "gpipe"),
        ("interleaved_1f1b", 8, "interleaved_1f1b"),
        ("interleaved_1f1b", 1, "interleaved_1f1b"),
        ("interleaved_zero_bubble", 9, "looped_bfs"),
        ("dualpipev", 8, "dualpipev"),
        ("dualpipev", 7, "zbv"),
        ("zbv", 1, "zbv"),
    ],
)
def test_a_schedule_that_cannot_run_a_number_of_micro_batches_gives_way(name: str, count: int, expected: str) -> None:
    per_rank = SCHEDULES[name].stages_per_rank or 2
    assert choose_schedule(name, 4, per_rank, count) == expected
    assert place_stages(expected, 4, per_rank) == place_stages(name, 4, per_rank)


def test_more_micro_batches_keep_ranks_busier() -> None:
    assert busy_share(2, 1, 1) == 0.5
    assert busy_share(4, 1, 12) == 0.8
    assert busy_share(4, 2, 12) > busy_share(4, 1, 12)


def test_a_result_goes_over_ranks_as_numbers() -> None:
    result = Result(3, torch.tensor(0.5), True)
    assert Result.of(result.numbers()) == Result(3.0, 0.5, True)
    assert Result.of(result.numbers()).weighted_loss == 1.5
    assert Result(0, float("nan")).weighted_loss == 0.0


def test_activations_are_sent_as_planned() -> None:
    planned = [Carried((2, 3), torch.float32, True)]
    tensor = torch.randn(3, 2, requires_grad=True)
    (sent,) = pack([tensor.T], planned, False, torch.device("cpu"))
    assert sent.is_contiguous()
    assert not sent._is_view()  # torch's zero-bubble schedules detach it in place
    with pytest.raises(instep.UsageError, match=r"^a stage of the pipeline gave a tensor of shape \(3, 2\) and type"):
        pack([tensor], planned, False, torch.device("cpu"))


def test_zero_bubble_schedules_get_gradients_for_every_activation() -> None:
    frozen = [Carried((2,), torch.float32, False), Carried((2,), torch.int64, False)]
    assert [each.requires_grad for each in for_split_backward(frozen)] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "options", "schedule", "text"),
    [
        (
            {"exact": True},
            {},
            "1f1b",
            "exact=True adds gradients in an order of its own and goes with parallel='ddp' only.",
        ),
        ({"compress": "bf16"}, {}, "1f1b", "compress='bf16' does not reach the stages of a pipeline and goes with"),
        (
            {},
            {"offload": True},
            "1f1b",
            "offload=True does not reach the stages of a pipeline yet. Leave one of them out.",
        ),
        (
            {},
            {"compile": True},
            "zbv",
            "schedule='zbv' takes the backward of a block apart, which a compiled one does not allow.",
        ),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(arguments: Any, options: Any, schedule: str, text: str) -> None:
    run = instep.Run(global_batch=8, **arguments)
    split = read_parallel(Parallel(pipeline=2, schedule=schedule))
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        check_pipeline(run._arguments, split, BlockOptions(**options))
    check_pipeline(instep.Run(global_batch=8)._arguments, split, BlockOptions())

"""Schedules of a pipeline: who runs which stage, what runs where a schedule cannot, and what does not go with one."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.pipelining.schedules import get_schedule_class

import instep
from instep.records.parallel import Parallel, read_parallel
from instep.records.schedules import SCHEDULES
from instep.train.seeds import get_generators, set_generators
from instep.train.slots import Slots
from instep.train.techniques.block_options import BlockOptions
from instep.train.techniques.pipeline.carry import for_split_backward, pack
from instep.train.techniques.pipeline.generators import NUMPY, PYTHON, TORCH, find_drawn, read_states, write_states
from instep.train.techniques.pipeline.job import Result
from instep.train.techniques.pipeline.lockstep import Passes, plan_passes
from instep.train.techniques.pipeline.schedule import busy_share, choose_schedule, place_stages
from instep.train.techniques.pipeline.share_out import advise_on_slots, check_pipeline
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


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        (Slots(32, 8, 0, 1), None),
        (
            Slots(36, 18, 1, 2),
            "1 micro-batch per step for the 4 ranks of a pipeline: micro_batch=4 would give each one to work on",
        ),
        (
            Slots(3, 1, 0, 1),
            "3 micro-batches per step for the 4 ranks of a pipeline: a global batch of 4 or more would give each one to work on",
        ),
    ],
)
def test_too_few_micro_batches_are_said_with_what_fits(slots: Slots, text: str | None) -> None:
    assert advise_on_slots(slots, 4) == text


def test_a_result_goes_over_ranks_as_numbers() -> None:
    result = Result(3, torch.tensor(0.5), True)
    assert Result.of(result.numbers()) == Result(3.0, 0.5, True)
    assert Result.of(result.numbers()).weighted_loss == 1.5
    assert Result(0, float("nan")).weighted_loss == 0.0


def test_activations_are_sent_as_planned() -> None:
    planned = [Carried((2, 3), torch.float32, True)]
    tensor = torch.randn(3, 2, requires_grad=True)
    (sent,) = pack([tensor.T], planned, (), torch.device("cpu"))
    assert sent.is_contiguous()
    assert not sent._is_view()  # torch's zero-bubble schedules detach it in place
    with pytest.raises(instep.UsageError, match=r"^a stage of the pipeline gave a tensor of shape \(3, 2\) and type"):
        pack([tensor], planned, (), torch.device("cpu"))


def test_generators_go_on_where_the_stage_before_stopped() -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(numpy.random.randn()), float(torch.randn(()))]

    set_generators(1)
    draw()  # normal numbers come in pairs, of which the second is kept
    states = read_states((TORCH, PYTHON, NUMPY), torch.device("cpu"))
    expected = [draw(), draw()]
    set_generators(2)
    write_states((TORCH, PYTHON, NUMPY), states)
    assert [draw(), draw()] == expected
    assert read_states((PYTHON,), torch.device("cpu")).numel() < states.numel()


def test_only_generators_that_were_drawn_from_are_sent() -> None:
    before = get_generators()
    assert find_drawn(before, get_generators()) == ()
    random.random()
    assert find_drawn(before, get_generators()) == (PYTHON,)
    numpy.random.rand()
    assert find_drawn(before, get_generators()) == (PYTHON, NUMPY)


@pytest.mark.parametrize(
    ("everyone", "expected"),
    [
        ([([4], False), ([4], False)], Passes()),
        ([([3, 1], True), ([3, 1], True)], Passes()),
        ([([4], False), ([3, 1], False)], Passes(turns=4)),
        ([([4], True), ([2], True), ([], True)], Passes(turns=4)),
        ([([1], False), ([], False)], Passes(is_whole=True)),
    ],
)
def test_ranks_that_share_a_stage_run_blocks_in_one_order(everyone: Any, expected: Passes) -> None:
    assert plan_passes(everyone) == expected


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
        (
            {"compress": "powersgd"},
            {},
            "1f1b",
            "compress='powersgd' keeps what it left out of a model's gradients and goes",
        ),
        (
            {},
            {"compile": True},
            "zbv",
            "schedule='zbv' takes the backward of a block apart, which a compiled one does not allow.",
        ),
        (
            {},
            {"recompute": "selective"},
            "zbv",
            "schedule='zbv' takes the backward of a block apart, and recompute='selective' keeps what one backward may use once. "
            "Take recompute='blocks', or '1f1b' or 'interleaved_1f1b'.",
        ),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(arguments: Any, options: Any, schedule: str, text: str) -> None:
    run = instep.Run(global_batch=8, **arguments)
    split = read_parallel(Parallel(pipeline=2, schedule=schedule))
    with pytest.raises(instep.UsageError, match="^" + re.escape(text)):
        check_pipeline(run._arguments, split, BlockOptions(**options))
    check_pipeline(instep.Run(global_batch=8)._arguments, split, BlockOptions())

"""Where a pipeline had better be cut, from how long its parts took."""

from __future__ import annotations

import torch
from torch import nn

from instep.train.techniques.pipeline.cut import cut_model
from instep.train.techniques.pipeline.stage_times import LOSS, StageClock, advise_on_cut


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(4, 10)


def spent(*blocks: float, loss: float) -> dict[str, float]:
    return {"table": 0.0, **{f"blocks.{i}": each for i, each in enumerate(blocks)}, "head": 0.0, LOSS: loss}


def test_a_slow_loss_moves_blocks_to_the_stages_before() -> None:
    model = Model()
    cuts = cut_model(model, 2, ["blocks.2"], "pipeline=2")
    assert advise_on_cut(model, cuts, spent(0.01, 0.01, 0.01, 0.01, loss=0.02)) == (
        "forward takes the stages 20, 40 ms per micro-batch, and the slowest sets the pace: Parallel(cut=['blocks.3']) would make "
        "it 30, 30, where memory allows"
    )


def test_nothing_is_said_where_no_cut_is_much_better_or_all_is_too_short_to_tell() -> None:
    model = Model()
    cuts = cut_model(model, 2, ["blocks.2"], "pipeline=2")
    assert advise_on_cut(model, cuts, spent(0.01, 0.01, 0.01, 0.01, loss=0.001)) is None
    assert advise_on_cut(model, cuts, spent(1e-5, 1e-5, 1e-5, 1e-5, loss=1e-4)) is None
    assert advise_on_cut(nn.Linear(2, 2), cuts, spent(0.01, 0.01, 0.01, 0.01, loss=0.1)) is None


def test_the_time_of_a_part_is_its_median() -> None:
    clock = StageClock(torch.device("cpu"))
    for _ in range(3):
        with clock.timing("part"):
            pass
    clock._seconds["part"][:2] = [5.0, 7.0]
    assert clock.read() == {"part": 5.0}

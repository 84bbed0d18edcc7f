"""Evaluation between steps is counted against the epochs of training."""

from __future__ import annotations

import pytest

from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.speed.evaluation_too_often import _largest
from instep.records.event import Event


def lap(step: int, backwards: int) -> Event:
    return Event("lap", 0.0, step, {"site": 1, "backwards": backwards, "exhausted": True, "seconds": 1.0, "batches": 4})


@pytest.mark.parametrize(("per_epoch", "counts"), [(1, False), (4, True)])
def test_once_after_each_epoch_is_usual(per_epoch: int, counts: bool) -> None:
    epochs = [[*(lap(8 * epoch + i + 1, 0) for i in range(per_epoch)), lap(8 * epoch + 8, 8)] for epoch in range(10)]
    view = RankView(0, None, tuple(event for epoch in epochs for event in epoch))
    assert bool(_largest(view)) is counts

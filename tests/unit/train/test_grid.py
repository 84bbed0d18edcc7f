"""The ranks as a grid: who has which data, and which ranks share it."""

from __future__ import annotations

import pytest

from instep.records.parallel import Parallel
from instep.train.meeting import can_go_on
from instep.train.mesh import data_place, num_peers, places


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Parallel(replicate=2, shard=2), [0, 1, 2, 3]),
        (Parallel(shard=2, tensor=2), [0, 0, 1, 1]),
        (Parallel(replicate=2, pipeline=2), [0, 1, 0, 1]),
        (Parallel(pipeline=2, replicate=2, tensor=2), [0, 0, 1, 1, 0, 0, 1, 1]),
    ],
)
def test_peers_along_tensor_and_pipeline_share_a_data_rank(split: Parallel, expected: list[int]) -> None:
    size = max(expected) + 1
    assert [data_place(split, rank) for rank in range(len(expected))] == [(rank, size) for rank in expected]
    assert num_peers(split) * size == len(expected) == len(places(split))


def test_a_wait_is_a_deadlock_only_when_no_group_is_complete() -> None:
    everyone, pair, other = [0, 1, 2, 3], [0, 1], [2, 3]
    assert can_go_on([("save at a.py:1", everyone)] * 3 + [("save at a.py:2", everyone)])
    assert can_go_on([("norm", pair), ("norm", pair), ("sums", other), ("norm", other)])
    assert not can_go_on([("norm", pair), ("sums", pair), ("sums", other), ("norm", other)])
    assert not can_go_on([("norm", pair), ("norm", everyone), ("sums", other), ("sums", everyone)])
    assert not can_go_on([("the end of its run", []), ("norm", pair), ("the end of its run", []), ("norm", other)])

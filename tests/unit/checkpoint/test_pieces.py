"""Every piece is written once, by one of its holders, and all write about as much."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from instep.train.checkpoint.pieces import Part, assign_writers, describe_parts, select

MIB = 1 << 20


def replicated(name: str, rows: int, num_bytes: int) -> Part:
    return Part(name, (0, 0), (rows, 8), num_bytes, cuttable=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_replicated_tensors_are_shared_out_evenly(num_ranks: int) -> None:
    parts = [replicated(f"t{i}", 64, 16 * MIB) for i in range(3)] + [Part("step", (), (), 4, cuttable=True)]
    writes = assign_writers([parts] * num_ranks)
    covered = Counter(
        part.name for share in writes for part in share for _ in range(part.sizes[0] if part.sizes else 1)
    )
    assert covered == {"t0": 64, "t1": 64, "t2": 64, "step": 1}
    assert all(len({part.name for part in share}) == len(share) for share in writes)
    load = [sum(part.num_bytes for part in share) for share in writes]
    assert max(load) - min(load) <= 3 * 16 * MIB / num_ranks * 0.4


def test_small_tensors_are_not_cut() -> None:
    (share, _) = assign_writers([[replicated("a", 100, 1000)]] * 2)
    assert share == [replicated("a", 100, 1000)]


def test_shards_stay_with_a_rank_that_holds_them() -> None:
    def shard(row: int) -> Part:
        return Part("w", (row, 0), (2, 8), 8 * MIB)

    held = [[shard(0)], [shard(2)], [shard(0)], [shard(2)]]  # two shards, two replicas of each
    writes = assign_writers(held)
    assert sorted(part.offsets for share in writes for part in share) == [(0, 0), (2, 0)]
    assert all(part in mine for mine, share in zip(held, writes) for part in share)


def test_what_one_rank_alone_holds_it_writes_in_one_piece() -> None:
    own = replicated("streams/3", 64, 64 * MIB)
    writes = assign_writers([[replicated("w", 64, MIB)], [replicated("w", 64, MIB), own]])
    assert own in writes[1]


def test_select_gives_the_numbers_of_a_part() -> None:
    tensor = torch.arange(24.0).reshape(6, 4)
    parts = describe_parts({"w": tensor})[0].cut(3)
    pieces = select({"w": tensor}, parts[1:2])
    assert [name for name, _ in pieces] == ["w"]
    assert torch.equal(pieces[0][1].local, tensor[2:4])
    assert pieces[0][1].offsets == (2, 0)

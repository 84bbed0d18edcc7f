"""When ranks count as stalled, and when the deadlock is proven."""

from __future__ import annotations

from typing import Any

import pytest

from instep.launch.deadlock import may_be_served
from instep.launch.judge_stall import OwnWork, Sight, judge


def sight(rank: int, at: float, waits: tuple[str, int] | None = None, alive: bool = True) -> Sight:
    return Sight(rank, alive, at, waits)


def test_ranks_in_different_collectives_are_a_proven_deadlock() -> None:
    stall = judge([sight(0, 10.0, ("all_reduce", 7)), sight(1, 11.0, ("barrier", 7))], 20.0, 8.0)
    assert stall is not None and stall.proven
    assert stall.since == 11.0 and stall.waiting == (0, 1) and stall.outside == ()


def test_the_same_collective_on_all_ranks_is_not_proven() -> None:
    stall = judge([sight(0, 1.0, ("all_reduce", 7)), sight(1, 1.0, ("all_reduce", 7))], 20.0, 8.0)
    assert stall is not None and not stall.proven


def test_a_rank_outside_may_still_come() -> None:
    stall = judge([sight(0, 1.0, ("barrier", 7)), sight(1, 1.0)], 20.0, 8.0)
    assert stall is not None and not stall.proven
    assert stall.outside == (1,)


def test_one_rank_that_makes_progress_is_no_stall() -> None:
    assert judge([sight(0, 1.0, ("barrier", 7)), sight(1, 15.0)], 20.0, 8.0) is None


def test_ranks_that_have_not_begun_or_are_at_their_end_are_not_stalled() -> None:
    assert judge([sight(0, 1.0), sight(1, 1.0)], 1000.0, 8.0) is None


def alone(own_work: OwnWork, longest_pause: float = 0.0) -> Sight:
    return Sight(0, True, 100.0, None, own_work, longest_pause)


@pytest.mark.parametrize(
    ("rank", "seconds"),
    [
        (alone("idle"), 8.0),
        (alone("preparing"), 80.0),  # data are tokenised, a file is unpacked: nobody knows how long that takes
        (alone("computing"), 8.0),
        (alone("computing", longest_pause=7.0), 21.0),  # it has made long pauses before, as in an evaluation
    ],
)
def test_without_anybody_waiting_patience_depends_on_what_a_rank_does(rank: Sight, seconds: float) -> None:
    assert judge([rank], 100.0 + seconds - 0.1, 8.0) is None
    stall = judge([rank], 100.0 + seconds, 8.0)
    assert stall is not None and not stall.proven and stall.outside == (0,) and stall.waiting == ()


def test_one_rank_that_prepares_data_speaks_for_all() -> None:
    assert judge([alone("preparing"), Sight(1, True, 100.0, None, "idle")], 130.0, 8.0) is None


def test_waiting_for_a_rank_that_has_ended_is_proven() -> None:
    stall = judge([sight(0, 1.0, ("barrier", 7)), sight(1, 2.0, alive=False)], 20.0, 8.0)
    assert stall is not None and stall.proven and stall.waiting == (0,) and stall.ended == (1,)


def entered(group: str, sequence: int, operation: str = "all_reduce", done: bool = False) -> dict[str, Any]:
    return {"group": group, "sequence": sequence, "operation": operation, "done": done}


def snapshot(*collectives: dict[str, Any], **groups: list[int]) -> dict[str, Any]:
    return {"collectives": list(collectives), "groups": groups}


def test_a_collective_that_all_its_members_have_entered_may_only_be_slow() -> None:
    rows = {0: ("a", [0, 1]), 1: ("a", [0, 1]), 2: ("b", [2, 3]), 3: ("b", [2, 3])}
    snapshots = {rank: snapshot(entered(group, 4), **{group: ranks}) for rank, (group, ranks) in rows.items()}
    assert may_be_served(snapshots, range(4))


def test_groups_entered_in_different_order_are_a_deadlock() -> None:
    both = {"a": [0, 1], "b": [0, 1]}
    snapshots = {0: snapshot(entered("a", 3), **both), 1: snapshot(entered("b", 3), **both)}
    assert not may_be_served(snapshots, (0, 1))


def test_different_operations_at_one_place_are_a_deadlock() -> None:
    world = {"0": [0, 1]}
    one = snapshot(entered("0", 7, "barrier"), **world)
    two = snapshot(entered("0", 7, "all_reduce"), **world)
    assert not may_be_served({0: one, 1: two}, (0, 1))


def test_without_snapshots_nothing_speaks_against_a_deadlock() -> None:
    assert not may_be_served({}, (0, 1))

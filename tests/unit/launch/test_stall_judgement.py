"""When ranks count as stalled, and when the deadlock is proven."""

from __future__ import annotations

from instep.launch.stall import Sight, judge


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


def test_nobody_waits_so_nothing_is_stalled() -> None:
    assert judge([sight(0, 1.0), sight(1, 1.0)], 20.0, 8.0) is None


def test_waiting_for_a_rank_that_has_ended_is_proven() -> None:
    stall = judge([sight(0, 1.0, ("barrier", 7)), sight(1, 2.0, alive=False)], 20.0, 8.0)
    assert stall is not None and stall.proven and stall.waiting == (0,)

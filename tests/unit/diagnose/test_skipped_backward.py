"""Gradients of different steps that met: the rank that had none for the first is the odd one."""

from __future__ import annotations

from instep.diagnose.pairing import Slot, _find_skipped_backward
from instep.records.finding import CallSite

SITE = CallSite("train.py", 41, "loss.backward()")


def table(rank: int, turns: list[int]) -> dict[int, Slot]:
    return {i: Slot(rank, i, "gradients", SITE, turn - 1, turn, False) for i, turn in enumerate(turns)}


def test_the_rank_that_skipped_is_named_without_a_habit_to_compare_with() -> None:
    tables = {0: table(0, [1, 2, 3]), 1: table(1, [1, 3, 4])}
    found = _find_skipped_backward(tables, (tables[0][1], tables[1][1]))
    assert found is not None
    assert (found.odd, found.expected, found.is_silent) == (1, ("gradients", SITE), True)


def test_of_several_that_skipped_none_is_named() -> None:
    tables = {0: table(0, [1, 2, 3]), 1: table(1, [1, 3, 4]), 2: table(2, [1, 3, 4])}
    assert _find_skipped_backward(tables, tuple(one[1] for one in tables.values())) is None


def test_one_that_averaged_twice_has_not_skipped() -> None:
    tables = {0: table(0, [1, 1, 2]), 1: table(1, [1, 2, 3])}
    assert _find_skipped_backward(tables, (tables[0][1], tables[1][1])) is None

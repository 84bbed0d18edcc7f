"""Order and folding of findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.diagnose.engine import diagnose, fold, judge, order
from instep.diagnose.naming import name_ranks
from instep.diagnose.run_view import RunView, read_run
from instep.records.finding import Certainty, Evidence, Finding


def finding(name: str, certainty: Certainty = "certain", explains: tuple[str, ...] = ()) -> Finding:
    return Finding(name, "title", "cause", ("fix",), (Evidence("fact", "source"),), certainty, explains=explains)


def test_consequences_are_folded_into_their_cause() -> None:
    kept = fold([finding("hang/x"), finding("numbers/silent-pairing", explains=("hang/*", "crash/*"))])
    assert [one.id for one in kept] == ["numbers/silent-pairing"]
    assert kept[0].explains == ("hang/x",)


def test_two_that_explain_each_other_leave_one() -> None:
    kept = fold([finding("hang/a", explains=("hang/*",)), finding("hang/b", explains=("hang/*",))])
    assert [one.id for one in kept] == ["hang/a"]


def test_the_most_certain_comes_first_and_what_ended_the_run_before_the_rest() -> None:
    found = [finding("speed/a"), finding("hang/b", "possible"), finding("numbers/c"), finding("crash/d")]
    assert [one.id for one in order(found)] == ["crash/d", "numbers/c", "speed/a", "hang/b"]


def test_of_a_run_that_broke_off_the_reason_comes_before_what_is_more_certain() -> None:
    found = [finding("numbers/same-order"), finding("hang/b", "likely"), finding("numbers/silent-pairing", "likely")]
    assert [one.id for one in order(found, broke_off=True)] == [
        "numbers/silent-pairing",
        "hang/b",
        "numbers/same-order",
    ]


def test_a_rule_that_fails_does_not_silence_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(run: RunView) -> Iterator[Finding]:
        yield finding("hang/lost")
        raise ZeroDivisionError

    def works(run: RunView) -> Iterator[Finding]:
        yield finding("hang/found")

    found = judge(read_run(tmp_path), {"hang/fails": fails, "hang/works": works})
    assert [one.id for one in found] == ["hang/found"]
    assert "the rule hang/fails failed" in capsys.readouterr().err


def test_an_empty_folder_gives_no_finding(tmp_path: Path) -> None:
    assert diagnose(tmp_path) == []


def test_ranks_in_words() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 3]) == "ranks 0-3"
    assert name_ranks([5, 0, 2]) == "ranks 0, 2 and 5"

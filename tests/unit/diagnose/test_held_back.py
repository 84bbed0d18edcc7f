"""An exception that a rank handles at the moment tells why it waits where the others do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from instep.diagnose.hang import find_held_back

ERROR = {"type": "ValueError", "message": "n/a", "frames": [{"file": "train.py", "line": 9, "name": "parse"}]}
POSITION: Any = SimpleNamespace(since=1.0, step=4, describe=lambda: "in barrier at train.py:30")


def run(*handling: dict[str, Any] | None) -> Any:
    views = tuple(SimpleNamespace(rank=r, handling=e, position=POSITION) for r, e in enumerate(handling))
    return SimpleNamespace(ranks=views, by_rank=dict(enumerate(views)))


def test_the_rank_that_handles_one_alone_is_named() -> None:
    found = find_held_back(run(None, ERROR), ())
    assert found is not None and found[0] == 1
    assert (found[1]["type"], found[1]["call"]) == ("ValueError", "in barrier at train.py:30")


def test_an_exception_that_all_ranks_handle_is_none() -> None:
    assert find_held_back(run(ERROR, ERROR), ()) is None


def test_a_rank_under_way_may_still_come() -> None:
    assert find_held_back(run(None, ERROR), (POSITION,)) is None


def test_the_echo_of_another_rank_is_none() -> None:
    assert find_held_back(run(None, ERROR | {"message": "Connection closed by peer"}), ()) is None

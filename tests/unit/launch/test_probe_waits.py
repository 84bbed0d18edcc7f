"""What the probe makes of a rank that looks at a collective again and again."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from instep.launch.probe.collectives import _ENTER, _LEAVE, _wrap_wait


class Work:
    """Fails at the first looks, as one whose partner is late."""

    def __init__(self, late: int, broken: bool = False) -> None:
        self.late, self.broken = late, broken

    def is_completed(self) -> bool:
        return self.broken

    def wait(self, timeout: timedelta | None = None) -> str:
        self.late -= 1
        if self.late >= 0:
            raise RuntimeError("Timed out waiting")
        return "done"


def watched() -> tuple[Any, list[int]]:
    marks: list[int] = []
    recorder = SimpleNamespace(
        main_thread=threading.get_ident(),
        depth=0,
        sites=SimpleNamespace(here=lambda depth: 0),
        mark=lambda kind, *rest: marks.append(kind),
    )
    return _wrap_wait(recorder, Work.wait), marks  # type: ignore[arg-type]


def test_a_wait_that_is_taken_up_again_is_one_wait() -> None:
    wait, marks = watched()
    work = Work(late=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Timed out"):
            wait(work, timedelta(seconds=1))
        assert marks == [_ENTER]  # still in it, so that it is seen to stall
    assert wait(work, timedelta(seconds=1)) == "done"
    assert marks == [_ENTER, _LEAVE]


def test_another_wait_is_another() -> None:
    wait, marks = watched()
    with pytest.raises(RuntimeError, match="Timed out"):
        wait(Work(late=1), timedelta(seconds=1))
    assert wait(Work(late=0)) == "done"
    assert marks == [_ENTER, _ENTER, _LEAVE]


def test_a_wait_that_fails_has_ended() -> None:
    wait, marks = watched()
    with pytest.raises(RuntimeError, match="Timed out"):
        wait(Work(late=1, broken=True), timedelta(seconds=1))
    assert marks == [_ENTER, _LEAVE]

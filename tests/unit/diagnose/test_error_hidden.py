"""Which exception a rank is said to have hidden."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from instep.diagnose.rules.crash.error_hidden import hidden_error

FRAMES = [{"file": "/home/me/train.py", "line": 7, "function": "<module>"}]


class Raised(SimpleNamespace):
    def __getitem__(self, name: str) -> Any:
        return self.facts[name]


def ended(error: dict[str, Any], event: str) -> Any:
    last = {"end": {"errors": [error]}} if event == "end" else {"raised": Raised(time=1.0, facts=error)}
    return SimpleNamespace(failure={"exit_code": 1}, marks=[], last=last.get)


@pytest.mark.parametrize("event", ["end", "raised"])
def test_an_error_in_a_line_of_the_script_is(event: str) -> None:
    error = {"type": "ValueError", "message": "bad", "frames": FRAMES}
    assert hidden_error(ended(error, event)) is error


@pytest.mark.parametrize("event", ["end", "raised"])
def test_an_error_before_the_first_line_of_the_script_is_not(event: str) -> None:
    error = {"type": "_Error", "message": "No module named 'nosuch'", "frames": []}
    assert hidden_error(ended(error, event)) is None

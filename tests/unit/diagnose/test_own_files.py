"""Whose a file in a stack is, and which errors only say that another rank has gone."""

from __future__ import annotations

import pytest

from instep.diagnose.frames import is_own
from instep.diagnose.rank_view import ECHO
from instep.launch.exits import is_consequence
from instep.train import meeting


@pytest.mark.parametrize(
    "file",
    [
        meeting.__file__,
        "/home/me/clone/src/instep/train/meeting.py",
        "/home/me/clone/src/instep/launch/zygote.py",
        "/usr/lib/python3.12/runpy.py",
        "/home/me/venv/lib/python3.12/site-packages/torch/nn/functional.py",
        "<string>",
    ],
)
def test_files_of_this_package_and_of_others_are_not_the_users(file: str) -> None:
    assert not is_own(file)


@pytest.mark.parametrize(
    "file", ["/home/me/train.py", "/home/me/instep/examples/02_gpt.py", "/home/me/instep/mine/a.py"]
)
def test_a_script_is_the_users(file: str) -> None:
    assert is_own(file)


@pytest.mark.parametrize("reason", ["its process 7 has ended", "it has left the run"])
def test_a_rank_that_misses_in_shared_memory_is_a_consequence(reason: str) -> None:
    message = f"rank 1 does not come to bucket 0: {reason}"
    assert ECHO.search(message)
    assert is_consequence({"type": "RuntimeError", "message": message})

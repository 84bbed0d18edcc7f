"""`launch`: `instep run` in a folder of its own; the test fails when the run has left a process behind.
`watched`: ranks of one zygote that serves all tests, which takes a tenth of the time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.launch.spawn import Zygote
from instep.records.launch_spec import Program
from launching import Launcher, Watched


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.await_gone(1.0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        pytest.fail(f"{len(left)} processes of the run still lived")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("INSTEP_", "PET_"))}
    zygote = Zygote("fork", Program("script", "tests"), plain | {"OMP_NUM_THREADS": "1"})
    assert zygote.hear() == {"answer": "ready", "reason": None}
    yield zygote
    zygote.close()


@pytest.fixture
def watched(zygote: Zygote, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Watched:
    return Watched(zygote, tmp_path, capfd)

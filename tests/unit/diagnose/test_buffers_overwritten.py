"""Two forwards of a wrapped model with buffers before one backward, and the error that follows on some versions of PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.crash.buffers_overwritten import check
from instep.diagnose.run_view import RunView
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.page import open_page
from instep.launch.probe.recorder import Recorder
from instep.records import recording as layout
from instep.records.event import Event
from instep.records.recording import KIND_NUMBER, read_page

MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation: [20] is at version 3"
FORWARD, STEP = KIND_NUMBER["enter-forward"], KIND_NUMBER["leave-step"]


def view_of(folder: Path, flags: int = 0, buffers: int = 2, copies: bool | None = None) -> RankView:
    recorder = Recorder(open_page(folder / "page.bin", 0, 1), EventLog(folder / "e"), 0, 1)
    recorder.mark(STEP)
    for site in (4, 5):
        recorder.mark(FORWARD, 0, flags, site, 0)
    sites = [Event("site", 0.0, 0, {"id": i, "file": "gan.py", "line": 10 + i, "name": "main"}) for i in (3, 4, 5)]
    wrap = {"wrapper": 0, "site": 3, "buffers": buffers, "broadcast_buffers": copies, "ranks": None}
    failure: Any = {"exit_code": 1, "error": {"type": "RuntimeError", "message": MODIFIED, "text": ""}}
    return RankView(0, read_page(folder / "page.bin"), (*sites, Event("wrap", 0.0, 0, wrap)), failure=failure)


def run_of(view: RankView) -> RunView:
    return RunView(Path("run"), (view,))


def test_the_second_forward_is_named(tmp_path: Path) -> None:
    [finding] = check(run_of(view_of(tmp_path)))
    assert (
        finding.title
        == "the forward at gan.py:15 overwrote buffers that the backward of the forward at gan.py:14 needs"
    )
    assert finding.fix[0] == "pass broadcast_buffers=False at gan.py:13"


@pytest.mark.parametrize("other", [{"buffers": 0}, {"copies": False}, {"flags": layout.NO_GRAD}])
def test_without_buffers_that_are_copied_it_is_another_cause(tmp_path: Path, other: dict[str, Any]) -> None:
    assert list(check(run_of(view_of(tmp_path, **other)))) == []


def test_another_error_is_another_cause(tmp_path: Path) -> None:
    view = replace(view_of(tmp_path), failure={"exit_code": 1, "error": {"type": "E", "message": "no", "text": ""}})
    assert list(check(run_of(view))) == []

"""A callback that stops a training library's loop on one rank is told at its own line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from instep.diagnose.engine import judge
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.stop_requests import find_stop_request
from instep.launch.probe import patching
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.recorder import Recorder
from instep.launch.probe.stop_requests import watch_stop_requests
from instep.records import recording as layout
from instep.records.event import Event, read_events
from instep.records.recording import Page

SCRIPT = """class Stop:
    def on_step_end(self, args, state, control):
        if state.loss < 0.1:
            control.should_training_stop = True
"""


class TrainerControl:
    should_training_stop = False
    should_log = False


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> TrainerControl:
    module = ModuleType("transformers.trainer_callback")
    module.TrainerControl = TrainerControl  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", module)
    monkeypatch.setattr(patching, "REPLACED", [])
    monkeypatch.setattr(TrainerControl, "__setattr__", object.__setattr__, raising=False)
    return TrainerControl()


def test_the_line_that_asks_is_noted_once(control: TrainerControl, tmp_path: Path) -> None:
    recorder = Recorder(bytearray(layout.PAGE_BYTES), EventLog(tmp_path / "events.jsonl"), 0, 1)
    watch_stop_requests(recorder)
    recorder.log.step = 9
    control.should_log = True
    control.should_training_stop = False
    control.should_training_stop = True
    control.should_training_stop = True
    events = read_events(tmp_path / "events.jsonl")
    (asked,) = [event for event in events if event.name == "stop-asked"]
    assert asked.step == 9 and asked["attribute"] == "should_training_stop"
    site = next(event for event in events if event.name == "site" and event["id"] == asked["site"])
    assert site["file"] == __file__ and control.should_training_stop is True


def view(rank: int, script: Path, step: int | None) -> RankView:
    data = bytearray(layout.PAGE_BYTES)
    layout.HEADER.pack_into(data, 0, layout.MAGIC, layout.VERSION, 2_000_000_000, rank, 2, 0.0, 0.0)
    layout.U64.pack_into(data, layout.NUM_STEPS, 9 if rank else 10)
    site = Event("site", 0.0, 0, {"id": 1, "file": str(script), "line": 4, "name": "on_step_end"})
    asked = Event(
        "stop-asked", 1.0, step or 0, {"site": 1, "attribute": "should_training_stop", "function": "on_step_end"}
    )
    gone = {"type": "RuntimeError", "message": "Connection closed by peer", "text": "", "time": 9.0}
    failure = {"exit_code": 1, "error": gone} if rank == 0 else None
    ended = {"code": 0, "ended_at": 5.0} if rank else None
    return RankView(rank, Page(bytes(data)), (site, asked) if step is not None else (), failure=failure, exit=ended)


def test_a_rank_that_ended_since_its_callback_said_so_is_told_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = RunView(tmp_path, (view(0, script, None), view(1, script, 9)))
    (finding,) = [one for one in judge(run) if one.id == "crash/rank-left-early"]
    assert finding.where is not None and finding.where.source == "if state.loss < 0.1:"
    assert "on_step_end set should_training_stop on rank 1 after step 9 and not on rank 0" in finding.cause
    assert finding.fix[0].startswith("let one rank decide and broadcast the decision")
    assert finding.fix[1] == "change train.py:3"


def test_all_ranks_may_stop_at_one_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert find_stop_request(RunView(tmp_path, (view(0, script, 9), view(1, script, 9)))) is None
    other = find_stop_request(RunView(tmp_path, (view(0, script, 12), view(1, script, 9))))
    assert other is not None and other.ranks == (1,)

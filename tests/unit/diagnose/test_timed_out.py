"""A wait that the backend gave up is a stall up to that moment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from instep.diagnose.timed_out import find_timed_out
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.page import open_page
from instep.launch.probe.recorder import Recorder
from instep.records.event import Event
from instep.records.recording import KIND_NUMBER, OPERATION_NUMBER, Page, read_page

GIVEN_UP = "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


def ranks(folder: Path) -> tuple[list[Recorder], list[Path]]:
    paths = [folder / f"page{rank}.bin" for rank in range(2)]
    return [Recorder(open_page(p, rank, 2), EventLog(folder / "e"), rank, 2) for rank, p in enumerate(paths)], paths


def read(paths: list[Path]) -> dict[int, Page]:
    pages = {rank: read_page(path) for rank, path in enumerate(paths)}
    return {rank: page for rank, page in pages.items() if page is not None}


def raised(message: str) -> dict[int, list[Event]]:
    facts: dict[str, Any] = {"call": "barrier", "type": "RuntimeError", "message": message, "frames": []}
    return {0: [Event("raised", time.monotonic(), 3, facts)]}


def test_the_rank_that_gave_up_was_waiting_and_the_other_was_not(tmp_path: Path) -> None:
    (waiting, busy), paths = ranks(tmp_path)
    busy.mark(KIND_NUMBER["leave-data"])
    waiting.mark(KIND_NUMBER["enter-collective"], OPERATION_NUMBER["barrier"])
    events = raised(GIVEN_UP)
    waiting.mark(KIND_NUMBER["leave-collective"], OPERATION_NUMBER["barrier"])  # on its way out with the error
    stall = find_timed_out(read(paths), events)
    assert stall is not None
    assert (stall["waiting"], stall["outside"], stall["timed_out"]) == ([0], [1], True)
    assert stall["seen_at"] == events[0][0].time


def test_another_error_is_none(tmp_path: Path) -> None:
    (waiting, _), paths = ranks(tmp_path)
    waiting.mark(KIND_NUMBER["enter-collective"], OPERATION_NUMBER["barrier"])
    assert find_timed_out(read(paths), raised("Connection closed by peer [127.0.0.1]:4242")) is None


def test_a_timeout_that_was_handled_before_is_none(tmp_path: Path) -> None:
    (waiting, _), paths = ranks(tmp_path)
    waiting.mark(KIND_NUMBER["enter-collective"], OPERATION_NUMBER["barrier"])
    events = raised(GIVEN_UP)
    events[0] += raised("list index out of range")[0]
    assert find_timed_out(read(paths), events) is None

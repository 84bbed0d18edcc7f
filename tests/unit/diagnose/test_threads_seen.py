"""Collectives of a thread beside the main one, in the default group."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instep.diagnose.threads import find_threaded
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.page import open_page
from instep.launch.probe.recorder import Recorder
from instep.records import recording as layout
from instep.records.finding import CallSite
from instep.records.recording import KIND_NUMBER, OPERATION_NUMBER, read_page

SITE = CallSite("train.py", 11, "dist.all_reduce(self.rate)")
ENTER, ALL_REDUCE = KIND_NUMBER["enter-collective"], OPERATION_NUMBER["all_reduce"]


def run_of(folder: Path, threaded: int, flags: int = 0, main_too: bool = True) -> Any:
    views = []
    for rank in range(2):
        recorder = Recorder(open_page(folder / f"{rank}.bin", rank, 2), EventLog(folder / "e"), rank, 2)
        if rank == threaded:
            thread = threading.Thread(target=recorder.mark, args=(ENTER, ALL_REDUCE, flags, 1))
            thread.start()
            thread.join()
        if main_too:
            recorder.mark(KIND_NUMBER["enter-backward"])
        page = read_page(folder / f"{rank}.bin")
        assert page is not None
        own = [mark for mark in page.marks() if not mark.flags & layout.OTHER_THREAD]
        views.append(SimpleNamespace(rank=rank, page=page, marks=own, position=None, site=lambda number: SITE))
    return SimpleNamespace(ranks=tuple(views))


def test_the_rank_and_the_line_of_the_thread_are_named(tmp_path: Path) -> None:
    found = find_threaded(run_of(tmp_path, threaded=1))
    assert found is not None
    assert (found.ranks, found.site, found.operation) == ((1,), SITE, "all_reduce")


def test_a_thread_with_a_group_of_its_own_is_none(tmp_path: Path) -> None:
    assert find_threaded(run_of(tmp_path, threaded=1, flags=layout.OTHER_GROUP)) is None


def test_a_thread_that_does_all_of_it_is_none(tmp_path: Path) -> None:
    assert find_threaded(run_of(tmp_path, threaded=1, main_too=False)) is None

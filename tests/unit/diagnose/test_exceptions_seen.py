"""Exceptions of which a rank does not end: those that its main thread handles, and those that end another thread."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.launch.probe.event_log import EventLog
from instep.launch.probe.exits import _wrap_exit, _wrap_refusal, _wrap_thread_hook, handled_error, note_program_exit
from instep.launch.probe.page import open_page
from instep.launch.probe.recorder import Recorder
from instep.records.event import Event, read_events


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(open_page(tmp_path / "page.bin", 0, 2), EventLog(tmp_path / "events.jsonl"), 0, 2)


def noted(folder: Path, name: str) -> list[Event]:
    return [event for event in read_events(folder / "events.jsonl") if event.name == name]


def see_from_another_thread() -> dict[str, Any] | None:
    """What the watching thread sees of this one."""
    here, found = threading.get_ident(), []
    watcher = threading.Thread(target=lambda: found.append(handled_error(here)))
    watcher.start()
    watcher.join()
    return found[0]


def test_an_exception_is_seen_while_a_finally_runs_because_of_it() -> None:
    seen: list[dict[str, Any] | None] = []
    with pytest.raises(ValueError, match="n/a"):
        try:
            int("n/a")
        finally:
            seen.append(see_from_another_thread())
    assert seen[0] is not None
    assert (seen[0]["type"], seen[0]["frames"][0]["file"]) == ("ValueError", __file__)


def test_nothing_is_seen_once_it_has_been_handled() -> None:
    with contextlib.suppress(ValueError):
        int("n/a")
    assert see_from_another_thread() is None


def test_an_exception_that_ends_a_thread_is_noted(recorder: Recorder, tmp_path: Path) -> None:
    def raise_it() -> None:
        raise OSError(5, "Input/output error")

    passed_on: list[Any] = []
    before, threading.excepthook = threading.excepthook, _wrap_thread_hook(recorder, passed_on.append)
    try:
        thread = threading.Thread(target=raise_it, name="reader")
        thread.start()
        thread.join()
    finally:
        threading.excepthook = before
    [event] = noted(tmp_path, "thread-raised")
    assert (event["thread"], event["type"], event["frames"][0]["name"]) == ("reader", "OSError", "raise_it")
    assert len(passed_on) == 1


def test_what_argparse_refuses_is_noted(recorder: Recorder, tmp_path: Path) -> None:
    refuse = _wrap_refusal(recorder, lambda parser, message: None)
    refuse(argparse.ArgumentParser(), "the following arguments are required: --lr")
    [event] = noted(tmp_path, "arguments-refused")
    assert event["message"] == "the following arguments are required: --lr"


@pytest.mark.parametrize(("given", "code", "message"), [(3, 3, None), ("no room", 1, "no room"), (None, 0, None)])
def test_an_exit_is_noted_with_code_and_words(
    recorder: Recorder, tmp_path: Path, given: Any, code: int, message: str | None
) -> None:
    _wrap_exit(recorder, lambda given: None, "sys.exit")(given)
    [event] = noted(tmp_path, "exit-called")
    assert (event["code"], event.get("message"), event["file"]) == (code, message, __file__)


def test_an_exit_by_raise_is_noted_at_its_line(recorder: Recorder, tmp_path: Path) -> None:
    try:
        raise SystemExit(4)
    except SystemExit as error:
        note_program_exit(recorder, error)
    [event] = noted(tmp_path, "exit-called")
    assert (event["code"], event["source"]) == (4, "raise SystemExit(4)")


def test_the_look_at_handled_exceptions_is_there_or_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(sys, "_current_exceptions")  # private to CPython
    monkeypatch.delattr(sys, "_current_exceptions")
    assert handled_error(threading.get_ident()) is None


def test_a_tuple_of_older_pythons_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    error = KeyError("cat")
    look = {7: (KeyError, error, None)}
    monkeypatch.setattr("instep.launch.probe.exits.sys", SimpleNamespace(_current_exceptions=lambda: look))
    found = handled_error(7)
    assert found is not None and found["type"] == "KeyError"

"""The checks of conftest.py notice what a test leaves behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest

import leaks


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.1)


def test_finds_nothing_where_nothing_changed() -> None:
    assert leaks.leaks_since(leaks.look_around()) == []


def test_names_a_variable_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaks.look_around()
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert leaks.leaks_since(before) == ["variable MASTER_PORT: None before, '29500' after"]


def test_names_a_thread() -> None:
    before = leaks.look_around()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="prefetch")
    thread.start()
    try:
        assert leaks.leaks_since(before) == ["thread 'prefetch' still runs"]
    finally:
        stop.set()
        thread.join()


def test_names_a_process() -> None:
    before = leaks.look_around()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert leaks.leaks_since(before) == [f"process {child.pid} still runs"]
    finally:
        child.communicate(b"\n")


def test_names_a_process_group() -> None:
    before = leaks.look_around()
    after = replace(before, has_group=True)
    assert leaks.find_leaks(before, after) == ["a process group of torch.distributed is still there"]

"""What is noted of a rank that goes to meet the others, and whose errors go through the probe."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.startup.another_address import check
from instep.diagnose.run_view import RunView
from instep.launch.probe.joining import find_address, is_listened_to
from instep.launch.probe.recorder import contained
from instep.records.event import Event


def test_the_address_is_read_from_the_method_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node3")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert find_address((), {}) == ("node3", "1234")
    assert find_address(("gloo", "env://"), {}) == ("node3", "1234")
    assert find_address((), {"init_method": "tcp://[::1]:29500"}) == ("::1", "29500")
    assert find_address((), {"init_method": "file:///tmp/meet"}) == ("", "")
    assert find_address((), {"store": object()}) == ("", "")


def test_a_port_that_is_listened_to_is_seen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
        assert not is_listened_to(port)
        server.listen()
        assert is_listened_to(port)
    assert not is_listened_to("")


def joining(rank: int, **facts: Any) -> RankView:
    row = {"site": 0, "host": "localhost", "port": "12355", "given_host": "localhost", "given_port": "40000"}
    row |= {"holds_store": True, "taken": False}
    return RankView(rank, None, (Event("joining", 1.0, 0, row | facts),), failure={"exit_code": 1})


def test_only_another_port_than_the_launchers_is_a_fault() -> None:
    (finding,) = check(RunView(Path(), (joining(0), joining(1))))
    assert finding.title == "the ranks look for each other at localhost:12355, where nobody listens"
    for right in ({"port": "40000"}, {"holds_store": False}, {"port": ""}):
        assert list(check(RunView(Path(), (joining(0, **right), joining(1, **right))))) == []


def test_an_error_of_the_scripts_signal_handler_is_not_taken_for_one_of_the_probe() -> None:
    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("the script's own")

    @contained
    def watch() -> None:
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(TimeoutError, match="the script's own"):
            watch()
    finally:
        signal.signal(signal.SIGUSR2, before)

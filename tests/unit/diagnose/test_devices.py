"""Rules about devices, from notes as ranks with GPUs would leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep.diagnose.rank_view import RankView
from instep.diagnose.rules.memory.one_device_for_all import check
from instep.diagnose.run_view import RunView
from instep.records.event import Event


def view(rank: int, **facts: Any) -> RankView:
    wrap = {"wrapper": 0, "site": 0, "ranks": None, "host": "node1", "visible": None, "device_count": 4} | facts
    return RankView(rank, None, (Event("wrap", 1.0, 0, wrap),))


def test_ranks_on_one_device_are_named() -> None:
    run = RunView(Path(), tuple(view(rank, device="cuda:0") for rank in range(4)))
    (finding,) = check(run)
    assert finding.title == "ranks 0-3 all train on cuda:0 of node1, which has 4 devices"
    assert finding.ranks == (1, 2, 3) and "LOCAL_RANK" in finding.fix[0]


def test_a_device_for_each_rank_is_no_finding() -> None:
    own = [view(rank, device=f"cuda:{rank}") for rank in range(4)]
    hidden = [view(rank, device="cuda:0", visible=str(rank), device_count=1) for rank in range(4)]
    hosts = [view(rank, device="cuda:0", host=f"node{rank}") for rank in range(4)]
    for views in (own, hidden, hosts, [view(0, device="cpu"), view(1, device="cpu")]):
        assert list(check(RunView(Path(), tuple(views)))) == []


def test_the_only_device_of_a_machine_may_be_shared() -> None:
    assert list(check(RunView(Path(), tuple(view(rank, device="cuda:0", device_count=1) for rank in range(2))))) == []

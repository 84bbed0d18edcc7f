"""Launchers of two nodes find the step at which their ranks' counts part, and the pages that still show it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.launch.link.nodes import Nodes
from instep.launch.link.pairs import EVERY_SECONDS, NodePairs, first_difference
from instep.launch.link.sharing import Sharing
from instep.launch.probe.event_log import EventLog
from instep.launch.probe.recorder import Recorder
from instep.records import recording as layout
from instep.records.recording import read_page
from instep.records.run_dir import RunDir

VARIABLES = {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


class Rank(Recorder):
    """Ends steps with as many collectives as it is told."""

    def __init__(self, rank: int, folder: Path) -> None:
        page = bytearray(layout.PAGE_BYTES)
        layout.HEADER.pack_into(page, 0, layout.MAGIC, layout.VERSION, 1, rank, 2, 0.0, 0.0)
        super().__init__(page, EventLog(folder / "events.jsonl"), rank, 2)
        self._reads = [False for _ in layout.KINDS]  # there is no group to ask

    def step(self, calls: int) -> None:
        self.sequence += calls
        self.turns += 1
        self.end_step(0, 0.1)


class Both:
    """Two nodes with one rank each."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[Nodes] = []
        self.ranks: list[Rank] = []
        for rank in range(2):
            run_dir = RunDir(folder / f"node{rank}")
            run_dir.rank(rank).root.mkdir(parents=True)
            self.nodes.append(Nodes(run_dir, lambda text: None))
            self.ranks.append(Rank(rank, run_dir.rank(rank).root))
        told = self.nodes[0].join(VARIABLES | {"GROUP_RANK": "0"}, (0,))
        self.nodes[1].join(VARIABLES | {"GROUP_RANK": "1"}, (1,))
        self.sharing = [Sharing(nodes) for nodes in self.nodes]  # takes the files that come
        self.pairs = [NodePairs(nodes) for nodes in self.nodes]
        self.nodes[1].found(told)
        self.now = 0.0
        self.until(lambda: all(nodes.is_whole for nodes in self.nodes))

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            for nodes in self.nodes:
                nodes.tick(time.monotonic())
            time.sleep(0.005)

    def look(self, times: int = 1) -> bool:
        """Whether the first node found something."""
        found = False
        for _ in range(times):
            self.now += EVERY_SECONDS
            for rank, pairs in enumerate(self.pairs):
                found = pairs.look({rank: self.ranks[rank].page}, self.now) or found  # type: ignore[dict-item]
            time.sleep(0.02)
            for nodes in self.nodes:
                nodes.tick(time.monotonic())
        return found


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    pair = Both(tmp_path)
    yield pair
    for nodes in pair.nodes:
        nodes.close()


def test_the_step_at_which_a_rank_of_another_node_left_one_out_is_found_while_it_runs(both: Both) -> None:
    found_at = None
    for step in range(1, 61):
        both.ranks[0].step(2)
        both.ranks[1].step(1 if step == 20 else 2)
        if step % 10 == 0 and both.look(2) and found_at is None:
            found_at = step
    assert found_at is not None and found_at <= 50
    first = both.nodes[0].run_dir
    told = json.loads(first.pairing.read_text())
    assert told == {"step": 20, "collectives": {"0": [40, 20], "1": [39, 20]}}
    for rank in range(2):
        page = read_page(first.rank(rank).mispaired_page)
        assert page is not None and 20 <= page.num_steps <= 30  # as it was then, and not as it is at the end


def test_equal_counts_are_no_difference(both: Both) -> None:
    for step in range(1, 41):
        for rank in both.ranks:
            rank.step(3 if step % 5 == 0 else 2)
        if step % 10 == 0:
            assert not both.look(2)
    assert not both.nodes[0].run_dir.pairing.exists()


def test_a_node_that_does_not_answer_is_not_waited_for(both: Both) -> None:
    for _ in range(3):
        both.ranks[0].step(2)
        both.ranks[1].step(1)
    both.look(2)
    both.nodes[1].handlers["keep-pages"] = lambda *_: None
    both.pairs[1]._wanted = None
    assert not both.look(12)
    assert both.pairs[0]._asked is None


def test_only_steps_that_all_ranks_have_ended_are_compared() -> None:
    counts = {0: {1: (2, 1), 2: (4, 2), 3: (6, 3)}, 1: {1: (2, 1), 2: (3, 2)}}
    assert first_difference(counts, 2, 1) == 2
    assert first_difference(counts, 2, 3) is None
    assert first_difference(counts, 3, 1) is None
    assert first_difference({0: counts[0]}, 2, 1) is None

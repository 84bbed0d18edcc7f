"""What the launchers of several nodes share while ranks run and at their end.

To the first node: how far each rank is (`sights`, some times a second), at a stall the files and facts of its ranks
(`answer`), at the end the same with exit codes (`ended`). From it: `ask`, `stop`, `report`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from instep.launch.judge_stall import Sight
from instep.launch.link.gather import keep_rank_file, send_rank_files
from instep.launch.link.nodes import Message, Nodes, Peer

STALE_SECONDS = 5.0  # of a node's newest sights; what its ranks do is not known then
SIGHTS_SECONDS = 0.5
GATHER_SECONDS = 10.0  # at the end, for the other nodes' files to come
REPORT_SECONDS = 30.0  # at the end, for the first node to judge; it may be waiting for slower nodes


class Sharing:
    """One per launch, over all attempts. Called from the launcher's loop only."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.asked = 0
        self.stop_asked = False
        self.report: list[dict[str, Any]] | None = None
        self._sights_at = 0.0
        nodes.handlers |= {
            "file": self._keep,
            "stop": self._note_stop,
            "report": self._note_report,
            "ask": self._note_ask,
        }
        nodes.handlers |= {"ended": lambda *_: nodes.write()}

    def _keep(self, peer: Peer, message: Message) -> None:
        if self.nodes.is_first:
            keep_rank_file(self.nodes.run_dir, peer, message)

    def _note_stop(self, _: Peer, __: Message) -> None:
        self.stop_asked = not self.nodes.is_first

    def _note_report(self, _: Peer, message: Message) -> None:
        self.report = list(message["findings"])

    def _note_ask(self, _: Peer, message: Message) -> None:
        self.asked = int(message["request"])

    # while ranks run

    def tell_sights(self, sights: Iterable[Sight], now: float) -> None:
        if now - self._sights_at >= SIGHTS_SECONDS:
            self._sights_at = now
            rows = [_write_sight(one, now) for one in sights]
            self.nodes.send({"do": "sights", "ranks": rows, "clock": now})

    def sights(self, now: float) -> list[Sight] | None:
        """Of the ranks on other nodes; None while they are not all known."""
        if not self.nodes.is_whole:
            return None
        found: list[Sight] = []
        for peer in self.nodes.peers.values():
            told = peer.facts.get("sights")
            if told is None or ("ended" not in peer.facts and now - float(told["clock"]) - peer.clock > STALE_SECONDS):
                return None
            found += [_read_sight(row, float(told["clock"]) + peer.clock) for row in told["ranks"]]
        return found if len(found) + len(self.nodes.ranks) == self.nodes.world_size else None

    def ask(self, request: int) -> None:
        """Has every other node gather what its ranks are doing."""
        self.nodes.send({"do": "ask", "request": request})

    def have_answered(self, request: int) -> bool:
        return all(peer.facts.get("answer", {}).get("request") == request for peer in self.nodes.peers.values())

    def rows(self, request: int) -> list[dict[str, Any]]:
        """What /proc said of the ranks on other nodes."""
        answers = [peer.facts.get("answer", {}) for peer in self.nodes.peers.values()]
        return [dict(row) for answer in answers if answer.get("request") == request for row in answer["ranks"]]

    def answer(self, request: int, rows: list[dict[str, Any]]) -> None:
        send_rank_files(self.nodes)
        self.nodes.send({"do": "answer", "request": request, "ranks": rows})

    def stop_others(self) -> None:
        if self.nodes.is_first:
            self.nodes.send({"do": "stop"})

    # at the end

    def exchange_ends(self, exits: dict[str, Any], crash: dict[str, Any] | None) -> None:
        """Brings all files to the first node. The others come back at once, the first when it has them or they are late."""
        if not self.nodes.is_first:
            send_rank_files(self.nodes)
        self.nodes.send({"do": "ended", "exits": exits, "crash": crash})
        if not self.nodes.is_first:
            return
        self._wait(GATHER_SECONDS, lambda: all("ended" in peer.facts for peer in self.nodes.present))
        self.nodes.write()

    def crashes(self) -> list[dict[str, Any]]:
        """The failures of other nodes, as findings."""
        return [crash for peer in self.nodes.peers.values() if (crash := peer.facts.get("ended", {}).get("crash"))]

    def tell_report(self, findings: list[dict[str, Any]]) -> None:
        self.nodes.send({"do": "report", "findings": findings})

    def await_report(self) -> list[dict[str, Any]] | None:
        """What the first node found; None when it does not say."""
        self._wait(REPORT_SECONDS, lambda: self.report is not None or not self.nodes.present)
        return self.report

    def _wait(self, seconds: float, done: Any) -> None:
        deadline = time.monotonic() + seconds
        self.nodes.tick(time.monotonic())
        while self.nodes.present and not done() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.nodes.tick(time.monotonic())


def _write_sight(sight: Sight, now: float) -> list[Any]:
    idle = round(now - sight.progressed_at, 2)
    return [sight.rank, sight.alive, idle, sight.waits_in, sight.own_work, sight.longest_pause]


def _read_sight(row: list[Any], seen_at: float) -> Sight:
    rank, alive, idle, waits, own_work, longest_pause = row
    place = (str(waits[0]), int(waits[1])) if waits else None
    return Sight(int(rank), bool(alive), seen_at - float(idle), place, own_work, float(longest_pause))


def describe_first(nodes: Nodes) -> str:
    first = nodes.peers.get(0)
    return f"the findings of all nodes are on node 0 ({first.host}), in {first.run_dir}" if first else ""

"""On several nodes: whether all ranks have taken part in equally many collectives by the end of the same optimizer step.

Each node tells the first how far the counts of its ranks were at each step. Pages are overwritten within seconds, so that
every node keeps those of the last seconds; when counts differ the first node asks for the ones that still show the step.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Mapping

from instep.launch.link.gather import send_rank_files
from instep.launch.link.nodes import Message, Nodes, Peer
from instep.launch.pairing import LOOK_STEPS, MOST_LOOKS
from instep.records.recording import Page, check_page
from instep.records.run_dir import RunDir, keep_json

EVERY_SECONDS = 0.5
KEPT_SECONDS = 5.0  # of pages; a page has a few hundred steps
ANSWER_SECONDS = 3.0
_MOST_STEPS = 4096  # of a rank, that are remembered

Counts = tuple[int, int]  # collectives and forwards whose backward averages, by the end of a step


class NodePairs:
    """One per launch; called from the launcher's loop only."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.run_dir: RunDir = nodes.run_dir
        self.counts: dict[int, dict[int, Counts]] = {}
        self.looks = 0
        self._newest: dict[int, int] = {}  # step of each rank that is known here
        self._told: dict[int, int] = {}  # newest step of each rank of ours that has been read
        self._kept: deque[dict[int, Page]] = deque(maxlen=int(KEPT_SECONDS / EVERY_SECONDS))
        self._next_at = 0.0
        self._next_step = 1
        self._asked: tuple[int, float] | None = None  # step and when, of what the first node waits for
        self._wanted: int | None = None  # step whose pages the first node wants from here
        nodes.handlers |= {"counts": self._note_counts, "keep-pages": self._note_wanted}

    def _note_counts(self, peer: Peer, message: Message) -> None:
        for rank, rows in message["ranks"]:
            if rows and int(rank) in peer.ranks and self.nodes.is_first:
                self._add(int(rank), [(int(step), int(calls), int(turns)) for step, calls, turns in rows])

    def _note_wanted(self, _: Peer, message: Message) -> None:
        self._wanted = None if self.nodes.is_first else int(message["step"])

    def _add(self, rank: int, rows: list[tuple[int, int, int]]) -> None:
        table = self.counts.setdefault(rank, {})
        if rows[0][0] <= self._newest.get(rank, 0):  # the rank has begun anew
            table.clear()
            self._next_step = 1
        self._newest[rank] = rows[-1][0]
        table.update({step: (calls, turns) for step, calls, turns in rows})
        for step in list(table)[: max(0, len(table) - _MOST_STEPS)]:
            del table[step]

    def look(self, mapped: Mapping[int, mmap.mmap], now: float) -> bool:
        """Whether a difference was found, and the pages that show it are here now."""
        if self._wanted is not None:
            self._send_pages(self._wanted)
            self._wanted = None
        if now < self._next_at or self.looks >= MOST_LOOKS:
            return False
        self._next_at = now + EVERY_SECONDS
        pages = {rank: page for rank, view in mapped.items() if (page := check_page(view[:])) is not None}
        self._kept.append(pages)
        if not self.nodes.is_whole:
            return False  # what is told before the others are there would be lost
        news = [(rank, rows) for rank, page in pages.items() if (rows := self._new_steps(rank, page))]
        if not self.nodes.is_first:
            if news:
                self.nodes.send({"do": "counts", "ranks": news})
            return False
        for rank, rows in news:
            self._add(rank, rows)
        return self._judge(now)

    def _new_steps(self, rank: int, page: Page) -> list[tuple[int, int, int]]:
        told, newest = self._told.get(rank, 0), page.num_steps
        first = 1 if newest < told else told + 1
        self._told[rank] = newest
        marks = [mark for step in range(first, newest + 1) if (mark := page.step_mark(step)) is not None]
        return [(mark.step, mark.sequence, mark.turns) for mark in marks]

    def _judge(self, now: float) -> bool:
        if self._asked is not None:
            return self._await_pages(now)
        step = first_difference(self.counts, self.nodes.world_size, self._next_step)
        if step is not None and self.nodes.is_whole:
            self._asked = step, now
            self._write(step)
            self.nodes.send({"do": "keep-pages", "step": step})
        elif step is None and len(self.counts) == self.nodes.world_size:
            self._forget_until(min(self._newest.values()))
        return False

    def _forget_until(self, last: int) -> None:
        """Steps that have been compared: with many ranks going through all of them again would take too long."""
        for table in self.counts.values():
            for step in [step for step in table if step <= last]:
                del table[step]

    def _await_pages(self, now: float) -> bool:
        step, since = self._asked or (0, now)
        come = [peer.facts.get("kept-pages", {}).get("step") == step for peer in self.nodes.peers.values()]
        if not all(come):
            if now - since > ANSWER_SECONDS:  # a node that is busy or gone: the end will show
                self._asked, self._next_step = None, step + LOOK_STEPS
            return False
        self.looks += 1
        self._asked, self._next_step = None, step + LOOK_STEPS
        rows = {str(rank): list(table[step]) for rank, table in self.counts.items() if step in table}
        keep_json(self.run_dir.pairing, {"step": step, "collectives": rows})
        return True

    def _send_pages(self, step: int) -> None:
        self._write(step)
        send_rank_files(self.nodes)
        self.nodes.send({"do": "kept-pages", "step": step})

    def _write(self, step: int) -> None:
        """The oldest pages that are still there in which all ranks of ours have ended the step."""
        shown = [pages for pages in self._kept if pages and min(page.num_steps for page in pages.values()) >= step]
        for rank, page in (shown[0] if shown else {}).items():
            with contextlib.suppress(OSError):  # a full disk costs the copy
                self.run_dir.rank(rank).mispaired_page.write_bytes(page.data)


def first_difference(counts: Mapping[int, Mapping[int, Counts]], world_size: int, since: int) -> int | None:
    """The first step that all ranks have ended in which their counts are not the same."""
    if len(counts) < world_size or world_size < 2:
        return None
    common = set.intersection(*(set(table) for table in counts.values()))
    different = [step for step in common if step >= since and len({table[step] for table in counts.values()}) > 1]
    return min(different, default=None)

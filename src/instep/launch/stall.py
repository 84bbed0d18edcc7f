"""Watches for stalls while ranks run, and tells of one when its facts are together.

A stall: for `stall_after` seconds no rank made progress (see `judge_stall`). Shortly before that time every rank is asked
for a snapshot, on other nodes too, so that the finding comes in time. What was seen goes to stall.json.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from instep.launch.deadlock import may_be_served, read_snapshots
from instep.launch.group_state import GroupState
from instep.launch.judge_stall import Sight, Stall, judge
from instep.launch.link.pairs import NodePairs
from instep.launch.link.sharing import Sharing
from instep.launch.pairing import PairWatch
from instep.launch.process_facts import list_descendants, read_cpu_seconds, read_state, send_stack_signal
from instep.launch.sights import Sights, Watched
from instep.launch.watch import Verdict
from instep.records import recording as layout
from instep.records.run_dir import RunDir, keep_json

ANSWER_SECONDS = 1.0  # a rank that has not sent its snapshot by then is stopped, or holds the interpreter's lock
MOST_CHILDREN = 32  # of a rank, that are asked where they are
STACK_SECONDS = 0.003  # to write it: all children of a rank write to one file
NODE_SECONDS = 1.0  # the same for another node, which waits for its ranks before it answers


@dataclass(frozen=True)
class Told:
    """What diagnosis says of a stall; hopeless: that some rank can never go on, whatever it waits in."""

    text: str
    hopeless: bool = False


class StallWatch:
    """Called some times a second. describe: turns what is in the run directory into text, and is called at a stall."""

    def __init__(self, run_dir: RunDir, stall_after: float, describe: Callable[[], Told]) -> None:
        self.run_dir = run_dir
        self.stall_after = stall_after
        self.describe = describe
        self.sights = Sights(run_dir)
        self.just_declared = False
        self._request = 0
        self._asked_at: float | None = None
        self._answered = 0  # the newest request of the first node that this one has answered
        self._declared = self._asked_survivors = False

    def look(self, pids: dict[int, int | None], now: float, sharing: Sharing | None = None) -> tuple[str, bool]:
        """pids: of every rank of this machine, None for one that has ended. Returns text to print, and whether the
        ranks can never go on. `now` is the monotonic clock."""
        sights = self.sights.look(pids, now)
        self.just_declared = False
        if sharing is not None and sharing.nodes.is_whole and not sharing.nodes.is_first:
            self._tell_first(sharing, sights, now)
            return "", False
        if sharing is not None and sharing.nodes.is_whole:
            elsewhere = sharing.sights(now)
            sights = [*sights, *elsewhere] if elsewhere is not None else []
        else:
            sharing = None
        early = min(ANSWER_SECONDS, self.stall_after / 2)
        if judge(sights, now, self.stall_after - early) is None:
            self._end_stall()
        elif not self._declared and self._is_told(sharing, now):
            stall = judge(sights, now, self.stall_after)
            if stall is not None:
                return self._declare(stall, sharing, now)
        return "", False

    def _declare(self, stall: Stall, sharing: Sharing | None, now: float) -> tuple[str, bool]:
        self._declared = self.just_declared = True
        if stall.proven and not stall.ended:
            snapshots = read_snapshots(self.run_dir, stall.waiting)
            stall = replace(stall, proven=not may_be_served(snapshots, stall.waiting))
        rows = self._rows(now) + (sharing.rows(self._request) if sharing is not None else [])
        keep_json(self.run_dir.stall, asdict(stall) | {"seen_at": now, "ranks": rows})
        told = self.describe()
        return told.text, stall.proven or told.hopeless

    def _is_told(self, sharing: Sharing | None, now: float) -> bool:
        """Asks all ranks where they are; whether they have answered, or will not."""
        if self._asked_at is None:
            self._ask(self._request + 1, now)
            if sharing is not None:
                sharing.ask(self._request)
            return False
        answered = self._own_ranks_told(now)
        if sharing is None or not answered:
            return answered
        return sharing.have_answered(self._request) or now - self._asked_at >= ANSWER_SECONDS + NODE_SECONDS

    def _tell_first(self, sharing: Sharing, sights: list[Sight], now: float) -> None:
        """The first node judges; it asks for more when it suspects a stall."""
        sharing.tell_sights(sights, now)
        if sharing.asked == self._answered:
            return
        if self._asked_at is None:
            self._ask(self._request + 1, now)
        elif self._own_ranks_told(now):
            self._answered, self._asked_at = sharing.asked, None
            sharing.answer(self._answered, self._rows(now))

    def ask_survivors(self) -> None:
        """After a failure, before the others are ended: where they are may be the cause of it."""
        if not self._asked_survivors:
            self._asked_survivors = True
            for watched in self.sights.ranks.values():
                layout.U64.pack_into(watched.page, layout.REQUEST, self._request + 1)
            self._request += 1

    def pages(self) -> dict[int, mmap.mmap]:
        return {rank: watched.page for rank, watched in self.sights.ranks.items()}

    def _ask(self, request: int, now: float) -> None:
        """Asks every rank for a snapshot, and every worker process for its stack."""
        self._asked_at, self._request = now, request
        for watched in self.sights.ranks.values():
            layout.U64.pack_into(watched.page, layout.REQUEST, request)
            watched.children = list_descendants(watched.pid)
            for pid in watched.children[:MOST_CHILDREN]:
                if send_stack_signal(pid):
                    time.sleep(STACK_SECONDS)
            if not _has_watcher(watched):
                self._signal(watched)

    def _own_ranks_told(self, now: float) -> bool:
        assert self._asked_at is not None
        if all(self._has_answered(watched) for watched in self.sights.ranks.values()):
            return True
        if now - self._asked_at >= ANSWER_SECONDS / 2:
            self._signal_silent_ranks()
        return now - self._asked_at >= ANSWER_SECONDS

    def _signal_silent_ranks(self) -> None:
        """A rank that holds the interpreter's lock still writes its stack from a signal handler."""
        for watched in self.sights.ranks.values():
            if not self._has_answered(watched):
                self._signal(watched)

    def _signal(self, watched: Watched) -> None:
        if watched.signalled != self._request:
            watched.signalled = self._request
            send_stack_signal(watched.pid)

    def _has_answered(self, watched: Watched) -> bool:
        return layout.U64.unpack_from(watched.page, layout.ANSWER)[0] == self._request

    def _rows(self, now: float) -> list[dict[str, Any]]:
        return [
            {
                "rank": watched.rank,
                "answered": self._has_answered(watched),
                "watched": _has_watcher(watched),
                "beat_age": round(now - layout.F64.unpack_from(watched.page, layout.BEAT)[0], 1),
                "state": read_state(watched.pid),
                "cpu_seconds": round(max(0.0, read_cpu_seconds(watched.pid) - watched.cpu_seconds), 2),
                "children": [{"pid": pid, "state": read_state(pid)} for pid in watched.children[:64]],
            }
            for watched in self.sights.ranks.values()
        ]

    def _end_stall(self) -> None:
        if self._declared:
            with contextlib.suppress(OSError):
                self.run_dir.stall.unlink()
        self._declared, self._asked_at = False, None


def _has_watcher(watched: Watched) -> bool:
    """Whether a thread in the rank answers; it is started when the rank first speaks of others."""
    return layout.F64.unpack_from(watched.page, layout.BEAT)[0] > 0


def watch_for_stalls(
    run_dir: RunDir, stall_after: float, stops: bool, describe: Callable[[], Told]
) -> Callable[[GroupState, float], Verdict | None]:
    """What the launcher's loop calls at every tick. stops: end the run at any stall, not only at a proven deadlock."""
    watch, pairs = StallWatch(run_dir, stall_after, describe), PairWatch(run_dir)
    between_nodes: list[NodePairs] = []

    def on_tick(group: GroupState, _: float) -> Verdict | None:
        pids = {rank.place.rank: rank.pid if rank.alive else None for rank in group.ranks}
        sharing = group.sharing
        if group.failures:
            watch.ask_survivors()
        text, hopeless = watch.look(pids, time.monotonic(), sharing)
        if sharing is not None and sharing.stop_asked:
            return Verdict(stop=True)
        if sharing is not None and sharing.nodes.size > 1:
            between_nodes[:] = between_nodes or [NodePairs(sharing.nodes)]
            found = between_nodes[0].look(watch.pages(), time.monotonic()) or sharing.nodes.take_news()
        else:
            found = pairs.look(watch.pages())
        if found and not text:
            return Verdict(describe().text)
        stop = watch.just_declared and (hopeless or stops)
        if stop and sharing is not None:
            sharing.stop_others()
        return Verdict(text, stop=stop) if text or watch.just_declared else None

    return on_tick

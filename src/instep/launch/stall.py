"""Whether the ranks of this machine have stalled, judged from their pages.

A stall: for `stall_after` seconds no rank made progress, and at least one waits in a collective. `judge` is the pure
part; `StallWatch` reads pages and /proc, asks the ranks for snapshots, and tells what it saw in stall.json.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from instep.launch.group_state import GroupState
from instep.launch.linux import list_children
from instep.launch.pairing import PairWatch
from instep.launch.watch import Verdict
from instep.records import recording as layout
from instep.records.recording import Page, check_page
from instep.records.run_dir import RunDir, write_json

STACK_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None  # as in launch/probe
MOVED_BYTES = 256 << 10  # read or written by a rank: less is a log line, not work
BUSY_SHARE = 0.3  # of a core, used since the last progress, above which a rank computes rather than waits
STALE_SECONDS = 2.0  # since the last beat of a rank's watching thread, which beats five times a second
ANSWER_SECONDS = 1.0  # a rank that has not sent its snapshot by then is stopped, or holds the interpreter's lock


@dataclass(frozen=True)
class Sight:
    """One rank as it is now. waits_in: what kind of collective it waits in, and the number of that collective."""

    rank: int
    alive: bool
    progressed_at: float
    waits_in: tuple[str, int] | None = None


@dataclass(frozen=True)
class Stall:
    """since: when the last rank made progress; proven: no rank can ever go on."""

    since: float
    waiting: tuple[int, ...]
    outside: tuple[int, ...]
    proven: bool


def judge(sights: Iterable[Sight], now: float, stall_after: float) -> Stall | None:
    """The stall that these ranks are in, if any."""
    sights = list(sights)
    alive = [sight for sight in sights if sight.alive]
    waiting = [sight for sight in alive if sight.waits_in is not None]
    if not waiting:
        return None
    since = max(sight.progressed_at for sight in alive)
    if now - since < stall_after:
        return None
    outside = tuple(sight.rank for sight in alive if sight.waits_in is None)
    places = {sight.waits_in for sight in waiting}
    proven = not outside and (len(places) > 1 or len(alive) < len(sights))
    return Stall(since, tuple(sight.rank for sight in waiting), outside, proven)


def waits_in(page: Page, now: float) -> tuple[str, int] | None:
    """The collective that the rank of this page has entered and not left.

    What the backend had pending is known only while the rank's watching thread lives: a process that is stopped, or that
    holds the interpreter's lock, has an old reading.
    """
    mark = page.last_mark()
    if mark is None or mark.kind == "ended":
        return None
    if mark.kind == "enter-collective":
        return mark.operation, mark.sequence
    if not page.pending or now - page.beat > STALE_SECONDS:
        return None
    return "backward" if "backward" in mark.kind else "started before", mark.sequence


def progress_of(page: Page) -> tuple[int, ...]:
    """Changes whenever the rank has done something."""
    return page.num_marks, page.forwards_seen, layout.I64.unpack_from(page.data, layout.LAST_COMPLETED)[0]


@dataclass
class _Watched:
    """What is remembered of one rank between two looks."""

    rank: int
    pid: int
    page: mmap.mmap
    started_at: float
    progress: tuple[int, ...] = ()
    progressed_at: float = 0.0
    moved_bytes: int = 0
    looked_at: float = 0.0
    cpu_seconds: float = 0.0
    signalled: int = 0
    busy: bool = False
    children: list[int] = field(default_factory=list[int])


@dataclass
class StallWatch:
    """Called some times a second. describe: turns what is in the run directory into text, and is called at a stall."""

    run_dir: RunDir
    stall_after: float
    describe: Callable[[], str]
    _ranks: dict[int, _Watched] = field(default_factory=dict[int, Any])
    _asked_at: float | None = None
    _declared: bool = False
    _request: int = 0
    just_declared: bool = False

    def look(self, pids: dict[int, int | None], now: float) -> tuple[str, bool]:
        """pids: of every rank of this machine, None for one that has ended. Returns text to print, and whether the
        deadlock is proven. `now` is the monotonic clock."""
        sights = [self._see(rank, pid, now) for rank, pid in pids.items()]
        self.just_declared = False
        known = [sight for sight in sights if sight is not None]
        stall = judge(known, now, self.stall_after) if known else None
        if stall is None:
            self._end_stall()
            return "", False
        if self._declared:
            return "", False
        if self._asked_at is None:
            self._ask(now)
            return "", False
        if not self._all_answered() and now - self._asked_at < ANSWER_SECONDS:
            if now - self._asked_at >= ANSWER_SECONDS / 2:
                self._signal_silent_ranks()
            return "", False
        self._declared = self.just_declared = True
        self._write(stall, now)
        return self.describe(), stall.proven

    def pages(self) -> dict[int, mmap.mmap]:
        return {rank: watched.page for rank, watched in self._ranks.items()}

    def _see(self, rank: int, pid: int | None, now: float) -> Sight | None:
        watched = self._ranks.get(rank)
        if pid is not None and (watched is None or watched.pid != pid):
            watched = self._open(rank, pid, now)
        if watched is None:
            return None
        page = check_page(watched.page[:])
        if page is None:
            return None
        if pid is None:
            return Sight(rank, False, watched.progressed_at)
        progress = progress_of(page)
        if progress != watched.progress or page.compiling:
            watched.busy = False
            watched.progress, watched.progressed_at = progress, now
        elif now - watched.looked_at >= 1.0 and now - watched.progressed_at >= 0.4:
            self._look_at_traffic(watched, now)
        waits = waits_in(page, now)
        if waits is not None and page.last_mark_kind != "enter-collective" and watched.busy:
            waits = None  # it computes while a collective that it has started goes on
        return Sight(rank, True, watched.progressed_at, waits)

    def _open(self, rank: int, pid: int, now: float) -> _Watched | None:
        try:
            with open(self.run_dir.rank(rank).page, "r+b") as file:
                page = mmap.mmap(file.fileno(), layout.PAGE_BYTES)
        except (OSError, ValueError):
            return None
        if layout.HEADER.unpack_from(page)[2] != pid:  # the page of an earlier start
            return None
        watched = self._ranks[rank] = _Watched(rank, pid, page, now, progressed_at=now)
        return watched

    def _look_at_traffic(self, watched: _Watched, now: float) -> None:
        """Bytes that the rank and its children read or wrote are progress: a big checkpoint, a slow file."""
        watched.looked_at = now
        watched.children = list_descendants(watched.pid)
        moved = sum(read_moved_bytes(pid) for pid in (watched.pid, *watched.children))
        if abs(moved - watched.moved_bytes) >= MOVED_BYTES:
            if watched.moved_bytes:
                watched.progressed_at = now
            watched.moved_bytes = moved
        used, since = read_cpu_seconds(watched.pid), now - watched.progressed_at
        if since < 1.5:
            watched.cpu_seconds, watched.busy = used, False
        else:
            watched.busy = used - watched.cpu_seconds > BUSY_SHARE * since

    def _ask(self, now: float) -> None:
        """Asks every rank for a snapshot, and every worker process for its stack."""
        self._asked_at = now
        self._request += 1
        for watched in self._ranks.values():
            layout.U64.pack_into(watched.page, layout.REQUEST, self._request)
            watched.children = list_descendants(watched.pid)
            for pid in watched.children:
                send_stack_signal(pid)

    def _signal_silent_ranks(self) -> None:
        """A rank that holds the interpreter's lock still writes its stack from a signal handler."""
        for watched in self._ranks.values():
            if not self._has_answered(watched) and watched.signalled != self._request:
                watched.signalled = self._request
                send_stack_signal(watched.pid)

    def _has_answered(self, watched: _Watched) -> bool:
        return layout.U64.unpack_from(watched.page, layout.ANSWER)[0] == self._request

    def _all_answered(self) -> bool:
        return all(self._has_answered(watched) for watched in self._ranks.values())

    def _write(self, stall: Stall, now: float) -> None:
        ranks: list[dict[str, Any]] = []
        for watched in self._ranks.values():
            ranks.append(
                {
                    "rank": watched.rank,
                    "answered": self._has_answered(watched),
                    "state": read_state(watched.pid),
                    "cpu_seconds": round(max(0.0, read_cpu_seconds(watched.pid) - watched.cpu_seconds), 2),
                    "children": [{"pid": pid, "state": read_state(pid)} for pid in watched.children[:64]],
                }
            )
        with contextlib.suppress(OSError):  # a full disk costs the file; the text is printed all the same
            write_json(self.run_dir.stall, asdict(stall) | {"seen_at": now, "ranks": ranks})

    def _end_stall(self) -> None:
        if self._declared:
            with contextlib.suppress(OSError):
                self.run_dir.stall.unlink()
        self._declared, self._asked_at = False, None


def watch_for_stalls(
    run_dir: RunDir, stall_after: float, stops: bool, describe: Callable[[], str]
) -> Callable[[GroupState, float], Verdict | None]:
    """What the launcher's loop calls at every tick. stops: end the run at any stall, not only at a proven deadlock."""
    watch, pairs = StallWatch(run_dir, stall_after, describe), PairWatch(run_dir)

    def on_tick(group: GroupState, now: float) -> Verdict | None:
        pids = {rank.place.rank: rank.pid if rank.alive else None for rank in group.ranks}
        text, proven = watch.look(pids, time.monotonic())
        if not text and pairs.look(watch.pages()):
            return Verdict(describe())
        declared = watch.just_declared
        return Verdict(text, stop=declared and (proven or stops)) if text or declared else None

    return on_tick


def list_descendants(pid: int, depth: int = 3) -> list[int]:
    children = list_children(pid)
    if depth > 1:
        for child in list(children):
            children += list_descendants(child, depth - 1)
    return children


def send_stack_signal(pid: int) -> bool:
    """Only to a process that handles it: to any other it would be the end."""
    if STACK_SIGNAL is None or not handles_signal(pid, STACK_SIGNAL):
        return False
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return False
    return True


def handles_signal(pid: int, number: int) -> bool:
    caught = _read_status(pid, "SigCgt:")
    return caught is not None and bool(int(caught, 16) >> (number - 1) & 1)


def read_state(pid: int) -> str:
    """R running, S sleeping, D in the kernel, T stopped, Z ended; empty when there is no such process."""
    return (_read_status(pid, "State:") or "")[:1]


def _read_status(pid: int, key: str) -> str | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((line.split()[1] for line in text.splitlines() if line.startswith(key)), None)


def read_moved_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    rows = dict(line.split(": ") for line in text.splitlines())
    return int(rows.get("rchar", 0)) + int(rows.get("wchar", 0))


def read_cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

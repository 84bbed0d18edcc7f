"""What the ranks of this machine are doing, seen from outside: their pages in shared memory, and /proc."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

from instep.launch.judge_stall import OwnWork, Sight
from instep.launch.process_facts import list_descendants, read_cpu_seconds, read_moved_bytes
from instep.records import recording as layout
from instep.records.recording import Mark, Page, check_page
from instep.records.run_dir import RunDir

MOVED_BYTES = 256 << 10  # read or written by a rank: less is a log line, not work
BUSY_SHARE = 0.3  # of a core, used since the last progress, above which a rank computes rather than waits
STALE_SECONDS = 2.0  # since the last beat of a rank's watching thread, which beats five times a second


def waits_in(page: Page, now: float) -> tuple[str, int] | None:
    """The collective that the rank of this page has entered and not left.

    What the backend had pending is known only while the rank's watching thread lives: a process that is stopped, or that
    holds the interpreter's lock, has an old reading.
    """
    mark = page.last_mark()
    if mark is None or mark.kind == "ended":
        return None
    if mark.kind == "enter-collective":
        return _name(mark), mark.sequence
    if not page.pending or now - page.beat > STALE_SECONDS:
        return None
    if page.is_elsewhere and not mark.kind.startswith("enter"):
        return None  # what it has started goes on behind its back
    return "backward" if "backward" in mark.kind else "started before", mark.sequence


def _name(mark: Mark) -> str:
    """Equal on all ranks that wait for one thing; those of a transfer wait for different ranks."""
    name = f"{mark.operation} of group {mark.group}" if mark.group else mark.operation
    return f"{name} with {mark.count - 1}" if mark.operation in layout.POINT_TO_POINT and mark.count else name


def progress_of(page: Page) -> tuple[int, ...]:
    """Changes whenever the rank has done something."""
    return page.num_marks, page.forwards_seen, layout.I64.unpack_from(page.data, layout.LAST_COMPLETED)[0]


@dataclass
class Watched:
    """What is remembered of one rank between two looks. busy: it or its children use a processor, no progress seen;
    longest_pause: without progress, so far, before the present one."""

    rank: int
    pid: int
    page: mmap.mmap
    progressed_at: float
    progress: tuple[int, ...] = ()
    moved_bytes: int = 0
    looked_at: float = 0.0
    counted_at: float = 0.0
    cpu_seconds: float = 0.0
    family_seconds: float = 0.0
    signalled: int = 0
    busy: bool = False
    family_busy: bool = False
    longest_pause: float = 0.0
    children: list[int] = field(default_factory=list[int])


class Sights:
    """Looks at every rank of this machine, some times a second."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.ranks: dict[int, Watched] = {}

    def look(self, pids: dict[int, int | None], now: float) -> list[Sight]:
        """pids: of every rank of this machine, None for one that has ended. Ranks without a page yet are left out."""
        seen = [self._see(rank, pid, now) for rank, pid in pids.items()]
        return [sight for sight in seen if sight is not None]

    def _see(self, rank: int, pid: int | None, now: float) -> Sight | None:
        watched = self.ranks.get(rank)
        if pid is not None and (watched is None or watched.pid != pid):
            watched = self._open(rank, pid, now)
        page = check_page(watched.page[:]) if watched is not None else None
        if watched is None or page is None:
            return None
        if pid is None:
            return Sight(rank, False, watched.progressed_at)
        progress = progress_of(page)
        if progress != watched.progress or page.compiling:
            watched.busy = watched.family_busy = False
            watched.longest_pause = max(watched.longest_pause, now - watched.progressed_at)
            watched.progress, watched.progressed_at = progress, now
        elif now - watched.looked_at >= 1.0 and now - watched.progressed_at >= 0.4:
            look_at_traffic(watched, now)
        waits = waits_in(page, now)
        if waits is not None and page.last_mark_kind != "enter-collective" and watched.busy:
            waits = None  # it computes while a collective that it has started goes on
        own = _own_work(watched, page)
        return Sight(rank, True, watched.progressed_at, waits, own, watched.longest_pause)

    def _open(self, rank: int, pid: int, now: float) -> Watched | None:
        try:
            with open(self.run_dir.rank(rank).page, "r+b") as file:
                page = mmap.mmap(file.fileno(), layout.PAGE_BYTES)
        except (OSError, ValueError):
            return None
        if layout.HEADER.unpack_from(page)[2] != pid:  # the page of an earlier start
            return None
        watched = self.ranks[rank] = Watched(rank, pid, page, now)
        return watched


def _own_work(watched: Watched, page: Page) -> OwnWork:
    if not page.last_mark_kind or (page.last_mark_kind == "ended" and watched.family_busy):
        return "unknown"
    if not watched.family_busy:
        return "idle"
    return "computing" if page.num_steps else "preparing"


def look_at_traffic(watched: Watched, now: float) -> None:
    """Bytes that the rank and its children read or wrote are progress: a big checkpoint, a slow file."""
    is_first = watched.looked_at < watched.progressed_at
    watched.looked_at = now
    watched.children = list_descendants(watched.pid)
    moved = sum(read_moved_bytes(pid) for pid in (watched.pid, *watched.children))
    used = read_cpu_seconds(watched.pid)
    family = used + sum(read_cpu_seconds(pid) for pid in watched.children)
    if is_first:  # what was moved before belongs to what it did before
        watched.moved_bytes, watched.cpu_seconds, watched.family_seconds = moved, used, family
        watched.counted_at = now
        return
    if abs(moved - watched.moved_bytes) >= MOVED_BYTES:
        watched.moved_bytes, watched.progressed_at = moved, now
        return
    since = now - watched.counted_at
    watched.busy = used - watched.cpu_seconds > BUSY_SHARE * since
    watched.family_busy = family - watched.family_seconds > BUSY_SHARE * since

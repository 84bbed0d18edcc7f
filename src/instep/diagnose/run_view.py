"""A run as the rules see it: what each rank noted, where it was last, how it ended. Read once, then only looked at."""

from __future__ import annotations

import json
import linecache
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from instep.diagnose.broken_off import find_last_stall
from instep.records import recording as layout
from instep.records.event import Event, read_events
from instep.records.finding import CallSite, Evidence
from instep.records.recording import Mark, Page, read_page
from instep.records.run_dir import RankDir, RunDir

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_TRACED = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
ECHO = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|socket timeout|remote process exited"
    r"|application timeout caused pair closure|communicator was aborted|was likely closed|timed out waiting"
    r"|does not come to bucket",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Frame:
    """One call on a stack. own: of the user's code."""

    file: str
    line: int
    name: str
    own: bool = True

    @property
    def site(self) -> CallSite:
        return CallSite(self.file, self.line, source_line(self.file, self.line))


@dataclass(frozen=True)
class Position:
    """What a rank's main thread was doing when it was last seen. kind: collective, backward, forward, data, step,
    outside, ended; frames: the user's, innermost first."""

    rank: int
    kind: str
    operation: str
    site: CallSite | None
    frames: tuple[Frame, ...]
    since: float
    step: int
    sequence: int
    count: int = 0

    @property
    def waits(self) -> bool:
        return self.kind == "collective"

    def describe(self) -> str:
        at = f" at {short(self.site)}" if self.site else ""
        if self.kind == "collective":
            return f"in {self.operation}{at}"
        words = {"backward": "in backward", "forward": "in the wrapped model's forward", "data": "waiting for a batch"}
        words |= {"step": "in optimizer.step", "ended": "at its end"}
        return f"{words.get(self.kind, 'running')}{at}"


def source_line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2 and 5`, `ranks 0-7`."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]}-{numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def short(site: CallSite | None) -> str:
    return f"{os.path.basename(site.file)}:{site.line}" if site else "an unknown line"


@dataclass(frozen=True)
class Place:
    """Of a rank on another node: its host, and what is to be added to its monotonic clock."""

    host: str
    clock: float
    is_alive: bool


@dataclass(frozen=True, eq=False)
class RankView:
    """One rank. Facts that were not left behind are None or empty; exit: code, time, and whether the launcher ended it;
    place: None on the node that reports; stalled_at: when the stall was judged that the run is still in."""

    rank: int
    page: Page | None
    events: tuple[Event, ...]
    snapshot: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    crash_text: str = ""
    stacks_text: str = ""
    mispaired: Page | None = None
    exit: dict[str, Any] | None = None
    place: Place | None = None
    stalled_at: float | None = None

    @cached_property
    def sites(self) -> dict[int, CallSite]:
        rows = self.named("site")
        return {row["id"]: CallSite(row["file"], row["line"], source_line(row["file"], row["line"])) for row in rows}

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def last(self, name: str) -> Event | None:
        found = self.named(name)
        return found[-1] if found else None

    def site(self, number: int | None) -> CallSite | None:
        return self.sites.get(number or 0)

    @cached_property
    def marks(self) -> list[Mark]:
        """Of the main thread; of a stall those before it was judged, and not what a stop from outside led to."""
        marks = _main_marks(self.page)
        at = self.stalled_at
        return marks if at is None else [mark for mark in marks if mark.when <= at]

    @property
    def mispaired_marks(self) -> list[Mark]:
        """As they were when the launcher first saw the ranks' counts differ; empty when it never did."""
        return _main_marks(self.mispaired)

    @property
    def num_steps(self) -> int:
        return self.page.num_steps if self.page else 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs, or when it is not known how it ended."""
        if self.failure is not None:
            return self.failure.get("exit_code")
        if self.exit is not None:
            return None if self.exit.get("by_us") else self.exit["code"]
        return 0 if self.reached_end and not self.is_alive else None

    @property
    def reached_end(self) -> bool:
        """Whether the interpreter came to its orderly end, whatever the exit code."""
        return bool(self.marks) and self.marks[-1].kind == "ended"

    @property
    def is_alive(self) -> bool:
        if self.place is not None:
            return self.place.is_alive
        return self.page is not None and _is_process(self.page.pid, self.page.started)

    @property
    def error(self) -> dict[str, Any] | None:
        """What it raised at its end: type, message, frames (dicts, innermost first)."""
        told = (self.failure or {}).get("error")
        if told:
            return {"type": told["type"], "message": told["message"], "frames": _frames_of_text(told.get("text", ""))}
        end = self.last("end")
        if end is not None and end["errors"]:
            return end["errors"][0]
        return None

    @property
    def echoes(self) -> bool:
        """Whether its error only says that another rank has gone."""
        error = self.error
        return error is not None and bool(ECHO.search(error["message"]))

    @property
    def newest_snapshot(self) -> dict[str, Any] | None:
        """The snapshot, unless the rank went on after it."""
        taken = (self.snapshot or {}).get("time")
        went_on = taken is not None and bool(self.marks) and self.marks[-1].when > taken
        return None if went_on else self.snapshot

    @property
    def main_frames(self) -> tuple[Frame, ...]:
        """The user's frames of the main thread, innermost first: from the snapshot, a fatal signal, or its error."""
        for thread in (self.newest_snapshot or {}).get("threads", ()):
            if thread["main"]:
                return tuple(_frame(one) for one in thread["frames"] if one["own"])
        if self.signalled_stack:
            return _own(self.signalled_stack)
        if self.crash_text:
            return _own(_frames_of_dump(self.crash_text))
        error = self.error
        return tuple(_frame(one) for one in error["frames"]) if error else ()

    @property
    def innermost(self) -> Frame | None:
        """The innermost frame of the main thread, the user's or not."""
        for thread in (self.newest_snapshot or {}).get("threads", ()):
            if thread["main"] and thread["frames"]:
                return _frame(thread["frames"][0])
        return self.signalled_stack[0] if self.signalled_stack else None

    @cached_property
    def signalled_stack(self) -> tuple[Frame, ...]:
        """Where the rank's main thread was when a signal made it write its stack: where no thread of ours answers."""
        if self.newest_snapshot is not None:
            return ()
        return next((stack for stack in self.worker_stacks if not is_worker(stack)), ())

    @property
    def other_threads(self) -> list[tuple[str, tuple[Frame, ...]]]:
        rows = (self.newest_snapshot or {}).get("threads", ())
        return [(row["name"], tuple(_frame(one) for one in row["frames"])) for row in rows if not row["main"]]

    @cached_property
    def worker_stacks(self) -> list[tuple[Frame, ...]]:
        """Stacks that processes forked from this rank wrote on request, and at worst the rank itself; newest first."""
        stacks = [_frames_of_dump(text) for text in _THREAD.split(self.stacks_text) if "File" in text]
        return stacks[::-1]

    @cached_property
    def pending(self) -> dict[str, Any] | None:
        """The oldest collective that had not come back, as the flight recorder knows it."""
        waiting = [one for one in (self.newest_snapshot or {}).get("collectives", ()) if not one["done"]]
        return waiting[0] if waiting else None

    @cached_property
    def position(self) -> Position | None:
        if self.page is None or not self.marks:
            return None
        mark = self.marks[-1]
        frames = self.main_frames or self._frames_of_mark(mark)
        here = frames[0].site if frames else None
        stage, _, what = mark.kind.partition("-")
        site = self.site(mark.site)
        since = mark.when + (self.place.clock if self.place is not None else 0.0)
        base = Position(self.rank, "outside", "", here or site, frames, since, mark.step, mark.sequence)
        if mark.kind == "ended":
            return replace(base, kind="ended", site=None)
        if stage == "enter" and what == "collective":
            return replace(base, kind="collective", operation=mark.operation, site=site)
        waiting = self.pending
        is_behind = self.page.pending and not self.page.is_elsewhere  # else the rank goes on while it is under way
        if waiting is not None and (is_behind or stage == "enter"):
            name = waiting["operation"] + (" (gradients)" if what == "backward" and stage == "enter" else "")
            at = site if stage == "enter" else here
            return replace(base, kind="collective", operation=name, site=at or here)
        if self.waits_in_training is not None:
            return replace(base, kind="collective", operation=self.waits_in_training)
        if stage == "enter":
            return replace(base, kind=what, site=site, count=mark.count)
        return base

    def _frames_of_mark(self, mark: Mark) -> tuple[Frame, ...]:
        """The line that a mark names, where nobody saw the stack."""
        event = next((row for row in self.named("site") if row["id"] == mark.site), None)
        return (Frame(event["file"], event["line"], event["name"]),) if event is not None else ()

    @property
    def waits_in_training(self) -> str | None:
        """The call of `instep.Run` in which the rank waits for the others, through memory that they share."""
        for thread in (self.newest_snapshot or {}).get("threads", ()):
            frames = [_frame(one) for one in thread["frames"]] if thread["main"] else []
            inner = list(takewhile(lambda frame: not frame.own, frames))
            ours = [frame for frame in inner if "/instep/train/" in frame.file]
            if ours and not any("/instep/train/data/" in frame.file for frame in ours):
                return ours[-1].name
        return None

    def cite(self, fact: str, source: str = "events.jsonl") -> Evidence:
        return Evidence(fact, f"rank{self.rank}/{source}", self.rank)


@dataclass(frozen=True, eq=False)
class RunView:
    """Everything known of a run."""

    root: Path
    ranks: tuple[RankView, ...]
    stall: dict[str, Any] | None = None
    pairing: dict[str, Any] | None = None
    nodes: dict[str, Any] | None = None
    launch: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def by_rank(self) -> dict[int, RankView]:
        return {view.rank: view for view in self.ranks}

    @property
    def world_size(self) -> int:
        return next((view.page.world_size for view in self.ranks if view.page), len(self.ranks))

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Of a run on several nodes: the host of each rank."""
        rows = (self.nodes or {}).get("nodes", ())
        return {int(rank): str(row["host"]) for row in rows for rank in row["ranks"]}

    def name(self, rank: int) -> str:
        """`rank 3`, with its host in a run on several nodes."""
        return f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}"

    @property
    def is_whole(self) -> bool:
        """Whether there are notes of every rank: without them nothing can be said about what differs."""
        return len(self.ranks) == self.world_size and all(view.page is not None for view in self.ranks)

    @property
    def positions(self) -> list[Position]:
        return [view.position for view in self.ranks if view.position is not None]

    def stalled_rank(self, rank: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = (self.stall or {}).get("ranks", [])
        none: dict[str, Any] = {}
        return next((row for row in rows if row["rank"] == rank), none)

    def events(self, name: str) -> dict[int, list[Event]]:
        """Events of a name by rank; ranks without any are left out."""
        return {view.rank: found for view in self.ranks if (found := view.named(name))}

    def seconds_since(self, when: float) -> float:
        seen = (self.stall or {}).get("seen_at")
        return max(0.0, seen - when) if seen else 0.0


def _main_marks(page: Page | None) -> list[Mark]:
    return [mark for mark in page.marks() if not mark.flags & layout.OTHER_THREAD] if page else []


def read_run(root: Path) -> RunView:
    run_dir = RunDir(root)
    nodes, exits = read_json(run_dir.nodes), read_json(run_dir.exits) or {}
    places = _places(nodes) if nodes is not None else {}
    exits |= _exits_elsewhere(nodes) if nodes is not None else {}
    stall, pairing = read_json(run_dir.stall), read_json(run_dir.pairing)
    if stall is None:
        stall = _last_stall(run_dir)
    seen_at = stall.get("seen_at") if stall is not None else None
    ranks = tuple(
        _read_rank(rank, run_dir.rank(rank), exits.get(str(rank)), places.get(rank), seen_at)
        for rank in run_dir.ranks()
    )
    return RunView(root, ranks, stall, pairing, nodes, read_json(run_dir.launch) or {})


def _last_stall(run_dir: RunDir) -> dict[str, Any] | None:
    pages = {rank: page for rank in run_dir.ranks() if (page := read_page(run_dir.rank(rank).page)) is not None}
    alive = any(_is_process(page.pid, page.started) for page in pages.values())
    return find_last_stall(pages, read_json(run_dir.exits), alive) if not run_dir.nodes.exists() else None


def _places(nodes: dict[str, Any]) -> dict[int, Place]:
    return {
        int(rank): Place(str(row["host"]), float(row.get("clock", 0.0)), rank in row.get("living", ()))
        for row in nodes["nodes"]
        if row["node"] != nodes["node"]
        for rank in row["ranks"]
    }


def _exits_elsewhere(nodes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in nodes["nodes"]:
        found |= row.get("exits") or {}
    return found


def _read_rank(
    rank: int, paths: RankDir, exit: dict[str, Any] | None, place: Place | None, seen_at: float | None
) -> RankView:
    return RankView(
        rank,
        read_page(paths.page),
        tuple(_by_our_clock(event, place) for event in read_events(paths.events)),
        read_json(paths.snapshot),
        read_json(paths.failure),
        read_text(paths.crash),
        read_text(paths.stacks),
        read_page(paths.mispaired_page),
        exit,
        place,
        None if seen_at is None else seen_at - (place.clock if place is not None else 0.0),
    )


def _by_our_clock(event: Event, place: Place | None) -> Event:
    return event if place is None else replace(event, time=event.time + place.clock)


def _is_process(pid: int, started: float) -> bool:
    """Whether the process lives that began its page then; its number may have gone to a younger one since."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and int(fields[19]) / os.sysconf("SC_CLK_TCK") <= started + 1


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_own(file: str) -> bool:
    """Whether a file in a stack is the user's, judged by its path alone."""
    return not (re.search(r"/(site|dist)-packages/|/lib(64)?/python\d|^<", file) or _is_ours(file))


def _is_ours(file: str) -> bool:
    """Whether it is a file of this package, wherever that was installed when the run was recorded."""
    _, found, inside = file.rpartition("/instep/")
    return bool(found) and "/" in inside and (Path(layout.__file__).parent.parent / inside).is_file()


def is_worker(stack: tuple[Frame, ...]) -> bool:
    """Whether it is of a worker process of a data loader."""
    return any(frame.name == "_worker_loop" for frame in stack)


def _frame(row: dict[str, Any]) -> Frame:
    return Frame(row["file"], row["line"], row["name"], row.get("own", True))


def _own(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return tuple(frame for frame in frames if frame.own)


def _frames_of_dump(text: str) -> tuple[Frame, ...]:
    """The main thread's part of what faulthandler wrote: the last stack that has a line of the user's, else the last."""
    stacks: list[tuple[Frame, ...]] = []
    for part in text.split("\n\n"):
        rows = [Frame(m["file"], int(m["line"]), m["name"], is_own(m["file"])) for m in _FRAME.finditer(part)]
        if rows:
            stacks.append(tuple(rows))
    with_own = [stack for stack in stacks if any(frame.own for frame in stack)]
    return (with_own or stacks or [()])[-1]


def _frames_of_text(text: str) -> list[dict[str, Any]]:
    """The user's frames of a printed traceback, innermost first."""
    tail = text.rpartition("Traceback (most recent call last)")[2]
    found = [m for m in _TRACED.finditer(tail) if is_own(m["file"])]
    return [{"file": m["file"], "line": int(m["line"]), "name": m["name"]} for m in reversed(found)]

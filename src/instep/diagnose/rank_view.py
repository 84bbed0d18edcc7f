"""One rank as the rules see it: what it noted, where it was last, how it ended. Read once, then only looked at."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from instep.diagnose.frames import (
    Frame,
    frame_of,
    frames_of_dump,
    frames_of_text,
    is_worker,
    own_frames,
    source_line,
    stacks_of_dump,
)
from instep.diagnose.naming import short
from instep.records import recording as layout
from instep.records.event import Event
from instep.records.finding import CallSite, Evidence
from instep.records.recording import Mark, Page

ECHO = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|socket timeout|remote process exited"
    r"|application timeout caused pair closure|communicator was aborted|was likely closed|timed out waiting"
    r"|does not come to bucket",
    re.IGNORECASE,
)

_DISTRIBUTED = ("/torch/nn/parallel/distributed.py", "/torch/distributed/")


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
        return self.page is not None and is_process(self.page.pid, self.page.started)

    @property
    def error(self) -> dict[str, Any] | None:
        """What it raised at its end: type, message, frames (dicts, innermost first)."""
        told = (self.failure or {}).get("error")
        if told:
            return {"type": told["type"], "message": told["message"], "frames": frames_of_text(told.get("text", ""))}
        end = self.last("end")
        if end is not None and end["errors"]:
            return end["errors"][0]
        return None

    @property
    def uncaught(self) -> dict[str, Any] | None:
        """An exception that ended its program, and is not the echo of another rank's end: also while its process lives."""
        event = self.last("uncaught")
        return event.facts if event is not None and not ECHO.search(event["message"]) else None

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
    def handling(self) -> dict[str, Any] | None:
        """The exception that the main thread handled when it was last seen: type, message, frames, innermost first."""
        return (self.newest_snapshot or {}).get("handling")

    @property
    def main_frames(self) -> tuple[Frame, ...]:
        """The user's frames of the main thread, innermost first: from the snapshot, a fatal signal, or its error."""
        for thread in (self.newest_snapshot or {}).get("threads", ()):
            if thread["main"]:
                return tuple(frame_of(one) for one in thread["frames"] if one["own"])
        if self.signalled_stack:
            return own_frames(self.signalled_stack)
        if self.crash_text:
            return own_frames(frames_of_dump(self.crash_text))
        error = self.error
        return tuple(frame_of(one) for one in error["frames"]) if error else ()

    @property
    def innermost(self) -> Frame | None:
        """The innermost frame of the main thread, the user's or not."""
        for thread in (self.newest_snapshot or {}).get("threads", ()):
            if thread["main"] and thread["frames"]:
                return frame_of(thread["frames"][0])
        return self.signalled_stack[0] if self.signalled_stack else None

    @property
    def is_in_distributed(self) -> bool:
        """Whether torch's own code for several processes is innermost, where it calls collectives of C++ that nothing else
        shows: making a wrapped model does so."""
        inner = self.innermost
        return inner is not None and any(part in inner.file for part in _DISTRIBUTED)

    @cached_property
    def signalled_stack(self) -> tuple[Frame, ...]:
        """Where the rank's main thread was when a signal made it write its stack: where no thread of ours answers."""
        if self.newest_snapshot is not None:
            return ()
        return next((stack for stack in self.worker_stacks if not is_worker(stack)), ())

    @property
    def other_threads(self) -> list[tuple[str, tuple[Frame, ...]]]:
        rows = (self.newest_snapshot or {}).get("threads", ())
        return [(row["name"], tuple(frame_of(one) for one in row["frames"])) for row in rows if not row["main"]]

    @cached_property
    def worker_stacks(self) -> list[tuple[Frame, ...]]:
        """Stacks that processes forked from this rank wrote on request, and at worst the rank itself; newest first."""
        return stacks_of_dump(self.stacks_text)[::-1]

    @cached_property
    def pending(self) -> dict[str, Any] | None:
        """The oldest collective that had not come back, as the flight recorder knows it."""
        waiting = [one for one in (self.newest_snapshot or {}).get("collectives", ()) if not one["done"]]
        return waiting[0] if waiting else None

    @cached_property
    def position(self) -> Position | None:
        if self.page is None:
            return None
        if not self.marks:  # it has not spoken of others yet
            frames = self.main_frames
            here = frames[0].site if frames else None
            return Position(self.rank, "outside", "", here, frames, self.page.started, 0, 0) if frames else None
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
            frames = [frame_of(one) for one in thread["frames"]] if thread["main"] else []
            inner = list(takewhile(lambda frame: not frame.own, frames))
            ours = [frame for frame in inner if "/instep/train/" in frame.file]
            if ours and not any("/instep/train/data/" in frame.file for frame in ours):
                return ours[-1].name
        return None

    def cite(self, fact: str, source: str = "events.jsonl") -> Evidence:
        return Evidence(fact, f"rank{self.rank}/{source}", self.rank)


def _main_marks(page: Page | None) -> list[Mark]:
    return [mark for mark in page.marks() if not mark.flags & layout.OTHER_THREAD] if page else []


def is_process(pid: int, started: float) -> bool:
    """Whether the process lives that began its page then; its number may have gone to a younger one since."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and int(fields[19]) / os.sysconf("SC_CLK_TCK") <= started + 1

"""A rank asked for memory that was not there.

## What it sees
The error of an allocator (of a device or of the host), or a data loader's worker that was killed or found no shared memory; what the
rank's memory was made of before.

## Why it matters
The rank ends, and the others with it.

## What to do
A smaller micro-batch with accumulation, recomputation of activations, half precision, sharded parameters and optimizer state
(`parallel="zero3"`), fewer workers. What helps most is what the largest part is.

## When it is wrong
When another program took the memory: compare what the rank held with what the device has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.memory_shares import cite_kinds
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding
from instep.units import format_bytes

_DEVICE = re.compile(r"out of memory|OutOfMemoryError", re.IGNORECASE)
_HOST = re.compile(r"can't allocate memory|cannot allocate memory|DefaultCPUAllocator|std::bad_alloc", re.IGNORECASE)
_ASKED = re.compile(r"you tried to allocate (\d+) bytes|[Tt]ried to allocate ([\d.]+ [KMGT]iB)")
_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)?:? ?([\d, ]+)\)+ (is killed by signal: Killed|exited unexpectedly)"
)
_SHARED = re.compile(
    r"insufficient shared memory|unable to (mmap|write|resize|allocate).*shm|No space left on device.*shm"
)


def check(run: RunView) -> Iterator[Finding]:
    found = [(view, kind) for view in run.ranks if (kind := kind_of(view)) is not None]
    if not found:
        return
    view, kind = found[0]
    error = view.error or {"frames": [], "message": ""}
    frames = error["frames"]
    where = (
        CallSite(frames[0]["file"], frames[0]["line"], source_line(frames[0]["file"], frames[0]["line"]))
        if frames
        else None
    )
    if kind in ("worker", "shared"):
        where = _loop(view) or where  # the error comes up wherever the rank happens to be
    title, cause, fix = _words(view, kind, error["message"], where)
    peak = (view.failure or {}).get("peak_bytes")
    yield Finding(
        id="memory/out-of-memory",
        title=title,
        cause=cause,
        fix=fix,
        evidence=(
            view.cite(" ".join(error["message"].split())[:220], "failure.json"),
            *cite_kinds(view),
            *((view.cite(f"the process had used {format_bytes(peak)} at most", "failure.json"),) if peak else ()),
        ),
        certainty="likely" if kind == "worker" else "certain",
        ranks=tuple(one.rank for one, other in found if other == kind),
        where=where,
        explains=("crash/*", "hang/*", "numbers/*"),
    )


def kind_of(view: RankView) -> str | None:
    """device, host, worker or shared; None for any other error."""
    error = view.error
    if error is None:
        return None
    text = f"{error['type']}: {error['message']}"
    if _SHARED.search(text):
        return "shared"
    if _WORKER.search(text):
        return "worker" if "Killed" in text or killed_workers(view) else None
    if _HOST.search(text) or error["type"] == "MemoryError":
        return "host"
    return "device" if _DEVICE.search(text) else None


def _loop(view: RankView) -> CallSite | None:
    """The line that goes through the loader."""
    mark = next((mark for mark in reversed(view.marks) if mark.kind in ("enter-data", "leave-data")), None)
    return view.site(mark.site) if mark is not None else None


def killed_workers(view: RankView) -> list[str]:
    """Processes of workers that ended by SIGKILL."""
    event = view.last("workers-ended")
    return [pid for pid, code in event["exits"].items() if code == -9] if event is not None else []


def _words(view: RankView, kind: str, message: str, where: CallSite | None) -> tuple[str, str, tuple[str, ...]]:
    name, at = name_ranks([view.rank]), f" at {short(where)}" if where else ""
    smaller = (
        "use a smaller micro-batch and accumulate",
        "or recompute activations, or shard parameters and optimizer state",
    )
    if kind == "worker":
        found = _WORKER.search(message)
        pid = found.group(1).strip() if found else ", ".join(killed_workers(view))
        return (
            f"a data loader worker of {name} (process {pid}) was killed",
            f"The kernel kills a process with SIGKILL when memory runs out; the worker served the loader gone through{at}.",
            (
                "use fewer workers",
                "keep the data set in a file that workers map, not in lists that each of them copies",
            ),
        )
    if kind == "shared":
        return (
            f"a data loader worker of {name} found no room in shared memory",
            f"Workers hand over batches in /dev/shm, which is full or small{at}.",
            ("give the container more of it (docker run --shm-size=8g)", "or use fewer workers or smaller batches"),
        )
    asked = _asked(message)
    what = "the device" if kind == "device" else "the host"
    return (
        f"{name} ran out of memory of {what}{f' when it asked for {asked}' if asked else ''}",
        f"There was not so much left{at}.",
        smaller,
    )


def _asked(message: str) -> str:
    found = _ASKED.search(message)
    if found is None:
        return ""
    return format_bytes(int(found.group(1))) if found.group(1) else found.group(2)

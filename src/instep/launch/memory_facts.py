"""What the cgroup and the kernel say about memory, for a process that was killed without a word."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryFacts:
    """oom_kills: processes of our cgroup killed for memory so far; limit_bytes: its limit. None: not known."""

    oom_kills: int | None = None
    limit_bytes: int | None = None
    total_bytes: int | None = None


def read_memory_facts(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> MemoryFacts:
    """Facts of this process's cgroup (both versions) and machine; unreadable ones are None."""
    for counts, limit in _own_files(root, membership):
        kills = _field(counts, "oom_kill")
        if kills is not None:
            return MemoryFacts(kills, _number(limit), _total())
    return MemoryFacts(total_bytes=_total())


def _own_files(root: Path, membership: Path) -> list[tuple[Path, Path]]:
    """Where kills are counted and where the limit stands: version 2 first, our group before the root's."""
    try:
        lines = membership.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    unified = next((line.split("::", 1)[1] for line in lines if line.startswith("0::")), "/").lstrip("/")
    memory = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"), "/").lstrip("/")
    second = [root / unified, root]
    first = [root / "memory" / memory, root / "memory"]
    return [(folder / "memory.events", folder / "memory.max") for folder in second] + [
        (folder / "memory.oom_control", folder / "memory.limit_in_bytes") for folder in first
    ]


def explain_kill(before: MemoryFacts, after: MemoryFacts) -> str | None:
    """A sentence when memory is known to be why a process was killed between the two readings."""
    if before.oom_kills is None or after.oom_kills is None or after.oom_kills <= before.oom_kills:
        return None
    limit = f" of {describe_bytes(after.limit_bytes)}" if after.limit_bytes and after.limit_bytes < 1 << 60 else ""
    times = after.oom_kills - before.oom_kills
    return (
        f"The cgroup's memory limit{limit} was reached, and the kernel killed for it {times} time{'s' * (times > 1)}."
    )


def describe_bytes(count: int) -> str:
    """`1.5 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max" is no limit
        return None


def _total() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

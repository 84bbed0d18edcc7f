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


def read_memory_facts(root: Path = _ROOT) -> MemoryFacts:
    """Facts of this process's cgroup (both versions) and machine; unreadable ones are None."""
    folder = _own_group(root)
    return MemoryFacts(
        oom_kills=_field(folder / "memory.events", "oom_kill")
        or _field(root / "memory/memory.oom_control", "oom_kill"),
        limit_bytes=_number(folder / "memory.max") or _number(root / "memory/memory.limit_in_bytes"),
        total_bytes=_total(),
    )


def explain_kill(before: MemoryFacts, after: MemoryFacts) -> str | None:
    """A sentence when memory is known to be why a process was killed between the two readings."""
    if before.oom_kills is None or after.oom_kills is None or after.oom_kills <= before.oom_kills:
        return None
    limit = f" of {describe_bytes(after.limit_bytes)}" if after.limit_bytes and after.limit_bytes < 1 << 60 else ""
    kills = after.oom_kills - before.oom_kills
    return f"the cgroup's memory limit{limit} was reached, and the kernel killed for it ({kills} kills meanwhile)"


def describe_bytes(count: int) -> str:
    """`1.5 GiB`."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _own_group(root: Path) -> Path:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return root
    unified = next((line.split("::", 1)[1] for line in lines if line.startswith("0::")), "/")
    folder = root / unified.lstrip("/")
    return folder if (folder / "memory.events").exists() else root


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

"""What the kernel can do for a family of processes: end a child with its parent, adopt orphans, list children.

Only Linux offers these; elsewhere each of them says so by returning False or an empty list.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> bool:
    """Asks for SIGKILL when the parent dies; ends this process at once if that has happened already."""
    asked = _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)
    return asked


def adopt_orphans() -> bool:
    """Makes this process the parent of every descendant whose own parent dies."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def list_children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, zombies included."""
    if not sys.platform.startswith("linux"):
        return []
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and read_parent(int(name)) == pid:
            found.append(int(name))
    return found


def read_parent(pid: int) -> int | None:
    """The parent of a process, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1])


def read_command(pid: int) -> str:
    """The command line of a process, shortened; its number when it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        text = ""
    return (text[:77] + "...") if len(text) > 80 else text or f"process {pid}"


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0

"""What the kernel tells of a rank's process and its children: state, traffic, time used; and a signal for its stack."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from instep.launch.linux import list_children

STACK_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None  # as in launch/probe


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

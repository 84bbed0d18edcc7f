"""When a node counts as silent or lost, and whether the link to it is down: pure judgement and two facts of the system."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SILENT_SECONDS = 8.0  # each side beats every second from a thread of its own; said, while the run goes on
LOST_SECONDS = 30.0  # a link may come back, and what was sent meanwhile with it; then the run ends
How = Literal["", "silent", "lost", "closed", "left"]
FOR_GOOD: tuple[How, ...] = ("lost", "closed", "left")
_DOWN = ("down", "lowerlayerdown", "notpresent")
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Loss:
    """how: silent (for some seconds), lost (for too long), closed (its launcher has died), left (it was stopped);
    interface: the one on this side, when it is down."""

    how: How
    seconds: float = 0.0
    why: str = ""
    interface: str = ""


def judge_silence(end: str | None, heard_at: float, now: float) -> How:
    """end: as of the connection."""
    if end is not None:
        return {"bye": "left", "again": ""}.get(end, "closed")  # pyright: ignore[reportReturnType]  # a literal each
    silent = now - heard_at
    return "lost" if silent >= LOST_SECONDS else "silent" if silent >= SILENT_SECONDS else ""


def name_node(node: int, host: str) -> str:
    return f"node {node} ({host})" if host else f"node {node}"


def describe_loss(name: str, loss: Loss) -> str:
    """One line for the log; the finding says more."""
    link = f"; {loss.interface}, the interface to it, is down" if loss.interface else ""
    if loss.how == "silent":
        return f"{name} has not been heard of for {loss.seconds:.0f} s{link}"
    if loss.how == "lost":
        return f"{name} has not been heard of for {loss.seconds:.0f} s{link}; it is lost"
    if loss.how == "left":
        return f"{name} was stopped while its ranks were needed here"
    return f"{name} is lost: the `instep run` there has died ({loss.why})"


def find_interface(address: str) -> str:
    """The network interface that has this address; empty where that cannot be told."""
    if not sys.platform.startswith("linux"):
        return ""
    with contextlib.suppress(OSError):
        for _, name in socket.if_nameindex():
            if address in _addresses(name):
                return name
    return ""


def _addresses(interface: str) -> list[str]:
    import fcntl

    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        row = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(row[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            fields = line.split()
            if fields[-1] == interface:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return found


def is_down(interface: str) -> bool:
    try:
        return Path(f"/sys/class/net/{interface}/operstate").read_text().strip() in _DOWN
    except OSError:
        return False

"""How a rank goes to meet the others: what the script says of itself, and whether the address it names can be right."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from instep.launch.probe.recorder import Recorder, contained

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # which network a group uses
_GIVEN = (
    os.environ.get("MASTER_ADDR", ""),
    os.environ.get("MASTER_PORT", ""),
)  # by the launcher, before the script ran
_LISTENS = "0A"  # state of a socket in /proc/net/tcp


@contained
def note_joining(recorder: Recorder, site: int, args: Any, options: dict[str, Any]) -> None:
    """What the script says of itself, beside what the launcher gave it."""
    rank, size = options.get("rank", -1), options.get("world_size", -1)
    host, port = find_address(args, options)
    recorder.log.note(
        "joining",
        site=site,
        said_rank=rank if isinstance(rank, int) and rank >= 0 else None,
        said_size=size if isinstance(size, int) and size >= 0 else None,
        rank=recorder.rank,
        world_size=recorder.world_size,
        interfaces={name: os.environ[name] for name in _INTERFACES if os.environ.get(name)},
        present=[name for _, name in socket.if_nameindex()],
        host=host,
        port=port,
        given_host=recorder.given_address[0],
        given_port=recorder.given_address[1],
        holds_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        taken=is_listened_to(port),
    )
    if host and (host, port) != recorder.given_address:
        threading.Thread(target=_look_up, args=(recorder, host), name="instep-look-up", daemon=True).start()


def find_address(args: Any, options: dict[str, Any]) -> tuple[str, str]:
    """Host and port at which the store is sought; empty for a store of the script's own or a file."""
    method = options.get("init_method") or (args[1] if len(args) > 1 else None) or "env://"
    if options.get("store") is not None or not isinstance(method, str):
        return "", ""
    if method.startswith("tcp://"):
        found = urlsplit(method)
        return found.hostname or "", str(found.port or "")
    if method.startswith("env://"):
        return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return "", ""


def is_listened_to(port: str) -> bool:
    """Whether a process of this machine listens on the port; False where the kernel does not tell."""
    if not port.isdecimal():
        return False
    wanted = f":{int(port):04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text(encoding="ascii").splitlines()[1:]]
        except OSError:
            continue
        if any(row[1].endswith(wanted) and row[3] == _LISTENS for row in rows):
            return True
    return False


@contained
def _look_up(recorder: Recorder, host: str) -> None:
    """In a thread of its own: a name server may take its time."""
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        recorder.log.note("host-not-found", host=host, error=str(error))

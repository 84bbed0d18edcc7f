"""Starts the ranks of a benchmark: on the loopback interface, or as two hosts with a slow link between them.

The two hosts are network namespaces of this machine, joined by a virtual cable whose rate is limited at both
ends (Linux, root, `ip` and `tc`). Each has its own host name and its own /dev/shm, as two machines have.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def why_no_hosts() -> str | None:
    """Why two hosts cannot be made here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found"
    return None if os.geteuid() == 0 else "network namespaces need root"


@contextmanager
def two_hosts(rate: str) -> Iterator[list[list[str]]]:
    """Commands that start what follows them on one host or the other; addresses 10.77.0.1 and 10.77.0.2."""
    tag = f"{os.getpid() % 100000}"
    spaces, cables = [f"is{side}{tag}" for side in "AB"], [f"v{side}{tag}" for side in "AB"]
    try:
        for space in spaces:
            call("ip", "netns", "add", space)
        call("ip", "link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (space, cable) in enumerate(zip(spaces, cables), 1):
            call("ip", "link", "set", cable, "netns", space)
            call("ip", "-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", cable)
            call("ip", "-n", space, "link", "set", "lo", "up")
            call("ip", "-n", space, "link", "set", cable, "up")
            limits = ("rate", rate, "burst", "256kb", "latency", "50ms")
            call("tc", "-n", space, "qdisc", "add", "dev", cable, "root", "tbf", *limits)
        own = 'mount -t tmpfs tmpfs /dev/shm && hostname "$0" && exec "$@"'
        yield [
            [
                *("ip", "netns", "exec", space, "env", f"GLOO_SOCKET_IFNAME={cable}"),
                *("unshare", "--uts", "--ipc", "--mount"),
                *("sh", "-c", own, space),
            ]
            for space, cable in zip(spaces, cables)
        ]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def run_ranks(command: Sequence[str], size: int, rate: str | None, log: str, timeout_seconds: float) -> None:
    """Runs `command` once per rank; their output goes to `log`. Raises RuntimeError when one fails or time is up."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and namespaces go in any case
    try:
        if rate is None:
            start_and_wait([[] for _ in range(size)], "127.0.0.1", command, log, timeout_seconds)
            return
        with two_hosts(rate) as hosts:
            start_and_wait(hosts, "10.77.0.1", command, log, timeout_seconds)
    finally:
        signal.signal(signal.SIGTERM, previous)


def start_and_wait(
    prefixes: list[list[str]], address: str, command: Sequence[str], log: str, timeout_seconds: float
) -> None:
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    apart = address != "127.0.0.1"  # one rank per host
    size = len(prefixes)
    ranks: list[subprocess.Popen[bytes]] = []
    with open(log, "wb") as output:
        try:
            for rank, prefix in enumerate(prefixes):
                own = {
                    "RANK": rank,
                    "WORLD_SIZE": size,
                    "LOCAL_RANK": 0 if apart else rank,
                    "LOCAL_WORLD_SIZE": 1 if apart else size,
                }
                environ = os.environ | shared | ({name: str(value) for name, value in own.items()} if size > 1 else {})
                ranks.append(
                    subprocess.Popen([*prefix, *command], env=environ, stdout=output, stderr=subprocess.STDOUT)
                )
            codes = [rank.wait(timeout_seconds) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [124]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(codes):
        with open(log, encoding="utf-8", errors="replace") as text:
            raise RuntimeError(f"ranks ended with {codes}:\n{text.read()[-4000:]}")

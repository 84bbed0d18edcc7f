"""Exit codes and errors in words: what a signal means, which errors only echo another rank's end."""

from __future__ import annotations

import signal
from typing import Any

_SIGNALS = {
    "SIGKILL": "killed by SIGKILL, which nothing can catch",
    "SIGSEGV": "crashed with SIGSEGV, an access to memory that is not its own",
    "SIGABRT": "aborted (SIGABRT), as C++ code does after an error it cannot handle",
    "SIGBUS": "crashed with SIGBUS, often a full /dev/shm or a file that was truncated while mapped",
    "SIGFPE": "crashed with SIGFPE, often a division of integers by zero",
    "SIGILL": "crashed with SIGILL, an instruction that this processor does not have",
    "SIGTERM": "ended by SIGTERM",
    "SIGINT": "interrupted by SIGINT",
}

OUR_ECHO = "does not come to bucket"  # of ranks that share memory
# What gloo, NCCL and the store say when the other side has gone. Texts, for want of types.
_ECHOES = (
    "connection closed by peer",
    OUR_ECHO,
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "connection was likely closed",
    "socket timeout",
    "remote process exited",
    "nccl communicator was aborted",
    "ncclremoteerror",
    "application timeout caused pair closure",
    "timed out waiting",
    "heartbeatmonitor",
)
_ECHO_TYPES = (
    "RuntimeError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionResetError",
    "BrokenPipeError",
)


def shell_code(exit_code: int) -> int:
    """What a shell would show: 128 + signal for a process that was killed."""
    return 128 - exit_code if exit_code < 0 else exit_code


def describe_exit(exit_code: int) -> str:
    """`exit code 3`, or the signal in words."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal_name(-exit_code)
    return (
        f"was {_SIGNALS[name]}"
        if name in ("SIGKILL", "SIGTERM", "SIGINT")
        else _SIGNALS.get(name, f"was ended by {name}")
    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def is_consequence(error: dict[str, Any] | None) -> bool:
    """Whether an exception only says that another rank has gone."""
    return echo_in(error) is not None


def echo_in(error: dict[str, Any] | None) -> str | None:
    """The words by which an exception says that another rank has gone, or None."""
    if error is None or error["type"] not in _ECHO_TYPES:
        return None
    text = error["message"].lower()
    return next((echo for echo in _ECHOES if echo in text), None)

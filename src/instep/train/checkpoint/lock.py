"""One run at a time in a run directory. The lock dies with its process, SIGKILL included. Needs no torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from instep.errors import UsageError
from instep.records.run_dir import RunDir

PATIENCE_SECONDS = 5.0  # a killed process holds its lock until its memory is given back, and ranks outlive a launcher
_held_here: set[Path] = set()  # a process does not conflict with its own locks


@dataclass
class Lock:
    """Record locks (not `flock`): data workers forked by the holder do not inherit them, and they work over NFS."""

    path: Path
    descriptor: int | None
    holder: str = ""  # what stands in the file

    def release(self) -> None:
        if self.descriptor is not None:
            _held_here.discard(self.path)
            os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
            self.descriptor = None


def take_lock(run_dir: RunDir, patience_seconds: float = PATIENCE_SECONDS) -> Lock:
    """Raises UsageError that names the process that holds it, or OSError when the directory cannot be written."""
    path = run_dir.lock.resolve()
    if path in _held_here:
        raise UsageError(_refusal(run_dir, f"by this process ({os.getpid()})"))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + patience_seconds
    while not _try_lock(descriptor):
        if time.monotonic() > deadline:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise UsageError(_refusal(run_dir, holder))
        time.sleep(0.1)
    _held_here.add(path)
    return Lock(path, descriptor, _write_holder(descriptor))


def sees_lock(run_dir: RunDir, holder: str, patience_seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether this process sees the directory in which another one has taken the lock."""
    deadline = time.monotonic() + patience_seconds  # a network file system may show it late
    while True:
        try:
            if run_dir.lock.read_text(encoding="utf-8") == holder:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        # a file system without locks: nothing can be refused there, and training goes on
    return True


def _write_holder(descriptor: int) -> str:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    return text


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"by process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "by another process"


def _refusal(run_dir: RunDir, holder: str) -> str:
    return (
        f"the run directory {run_dir.root} is in use {holder}. Two runs would mix their checkpoints: wait for it, "
        "stop it, or give this run another directory."
    )

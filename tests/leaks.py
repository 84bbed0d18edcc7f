"""What a test may leave behind in this process: nothing. Taken before and after each test by conftest.py."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass

import psutil

# Set by libraries when they are first imported or used, once per process.
LIBRARY_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "TF_CPP_", "TOKENIZERS_", "HF_", "PYDEVD_")
# Helpers that multiprocessing and torch.compile start once and keep until the interpreter ends.
LIBRARY_PROCESSES = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch._inductor.compile_worker",
    "torch/_inductor/compile_worker",
)
GRACE_SECONDS = 2.0  # a thread or a process that has been told to end needs a moment


@dataclass(frozen=True)
class Surroundings:
    variables: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    has_group: bool


def look_around() -> Surroundings:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(LIBRARY_VARIABLES)}
    return Surroundings(variables, frozenset(threading.enumerate()), living_children(), has_process_group())


def leaks_since(before: Surroundings) -> list[str]:
    """One sentence for each thing that is there now and was not before."""
    found = find_leaks(before, look_around())
    deadline = time.monotonic() + GRACE_SECONDS
    while any(leak.startswith(("thread", "process ")) for leak in found) and time.monotonic() < deadline:
        time.sleep(0.05)
        found = find_leaks(before, look_around())
    return found


def find_leaks(before: Surroundings, after: Surroundings) -> list[str]:
    names = before.variables.keys() | after.variables.keys()
    leaks = [
        f"variable {name}: {before.variables.get(name)!r} before, {after.variables.get(name)!r} after"
        for name in sorted(names)
        if before.variables.get(name) != after.variables.get(name)
    ]
    leaks += [f"thread {thread.name!r} still runs" for thread in after.threads - before.threads]
    leaks += [f"process {child} still runs" for child in sorted(after.children - before.children)]
    if after.has_group and not before.has_group:
        leaks.append("a process group of torch.distributed is still there")
    return leaks


def living_children() -> frozenset[int]:
    living: set[int] = set()
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline())
            ended = child.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
        if not ended and not any(name in command for name in LIBRARY_PROCESSES):
            living.add(child.pid)
    return frozenset(living)


def has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()

"""How much memory the workers of a data loader have for themselves, how large the data set's lists are, how workers end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from instep.launch.probe.recorder import Recorder, contained

LOOK_AT = (32, 128, 256, 512, 1024, 2048)  # batches of a pass; reading takes milliseconds for a large process
_LONG = 50_000
_SAMPLED = 200


@contained
def note_worker_memory(recorder: Recorder, number: int, dataset: Any, iterator: Any) -> None:
    pids = [worker.pid for worker in getattr(iterator, "_workers", ())]
    listed = measure_lists(dataset)
    if pids and listed:
        private = [read_private_bytes(pid) for pid in pids]
        recorder.log.note("worker-memory", loader=number, private=private, listed=listed)


@contained
def note_dead_workers(recorder: Recorder, iterator: Any) -> None:
    """How workers ended that should not have: the error itself may not say."""
    ended = {worker.pid: worker.exitcode for worker in getattr(iterator, "_workers", ()) if worker.exitcode}
    if ended:
        recorder.log.note("workers-ended", exits=ended)


def read_private_bytes(pid: int) -> int:
    """Memory of a process that no other shares; 0 where the kernel does not tell."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))


def measure_lists(dataset: Any) -> list[dict[str, Any]]:
    """Long lists and dictionaries of Python objects in a data set: attribute, length and about how many bytes."""
    rows: list[dict[str, Any]] = []
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, (list, tuple, dict)) and len(value) >= _LONG:
            items = list(value.values())[:_SAMPLED] if isinstance(value, dict) else value[:_SAMPLED]
            each = sum(_size(item) for item in items) / len(items) + 8
            rows.append({"name": name, "length": len(value), "bytes": int(each * len(value))})
    return rows


def _size(item: Any) -> int:
    inner = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return sys.getsizeof(item) + sum(sys.getsizeof(part) for part in inner)

"""torch's flight recorder: collectives that C++ started, which no wrapper in Python sees.

All of it is private API of torch; where it is missing or fails, the answer is None and the rest goes on without.
"""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any


def _function(name: str) -> Any:
    try:
        import torch._C._distributed_c10d as c10d
    except ImportError:
        return None
    return getattr(c10d, name, None)


def read_status() -> tuple[int, int] | None:
    """Number of the newest collective handed to the backend, and of the newest that has come back. About 4 us.

    Taken over all groups as sums, so that a group that waits is seen however many groups there are.
    """
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = _function(name)
        if dump is None:
            continue
        try:
            groups = json.loads(dump(False, True)).get("pg_status") or {}
        except (RuntimeError, ValueError, TypeError):
            continue
        if groups:
            rows = [row for row in groups.values() if int(row["last_enqueued_collective"]) >= 0]
            enqueued = sum(int(row["last_enqueued_collective"]) for row in rows)
            return enqueued, sum(max(0, int(row["last_completed_collective"])) for row in rows)
    return None


def read_entries(newest: int = 48) -> list[dict[str, Any]]:
    """The newest collectives. Milliseconds: only on request.

    Without the lines that started them: to name those, torch imports its compiler, which takes seconds.
    """
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = _function(name)
        if dump is None:
            continue
        try:
            entries = pickle.loads(dump(True, False, False)).get("entries") or []
        except (RuntimeError, ValueError, TypeError, pickle.UnpicklingError):
            continue
        if entries:
            return [_brief(entry) for entry in sorted(entries, key=lambda one: one["record_id"])[-newest:]]
    return []


def read_groups() -> dict[str, list[int]]:
    """The ranks of every process group that this rank is in, by the name that the recorder gives the group."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    try:
        return {
            str(world.pg_names[group]): sorted(int(rank) for rank in ranks)  # type: ignore[union-attr]
            for group, ranks in world.pg_group_ranks.items()  # type: ignore[union-attr]
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def has_device_groups() -> bool:
    """Whether a backend hands collectives to a device: then a rank may wait in any line that needs their result."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    try:
        return any(str(names[0]) not in ("gloo", "mpi") for names in world.pg_map.values())  # type: ignore[union-attr]
    except (AttributeError, IndexError, TypeError):
        return True


def _brief(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "operation": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        "group": entry["process_group"][0],
        "sequence": entry["collective_seq_id"],
        "sizes": entry["input_sizes"],
        "dtypes": entry["input_dtypes"],
        "done": bool(entry.get("retired")) or entry.get("state") == "completed",
    }

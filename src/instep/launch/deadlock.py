"""Whether ranks that all wait may still be served: the newest collectives of each, group by group, side by side.

Ranks in different collectives of one group wait for ever. Those of different groups need not: each group may have all its
members, and only its transfer be slow. So a collective that every member has entered speaks against a deadlock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from instep.records.run_dir import RunDir

Snapshot = dict[str, Any]


def may_be_served(snapshots: Mapping[int, Snapshot], waiting: Iterable[int]) -> bool:
    """Whether a rank waits in a collective that all members of its group have entered, as far as their snapshots tell."""
    return any(
        _is_complete(snapshots, pending) for rank in waiting if (pending := _oldest_pending(snapshots.get(rank)))
    )


def _oldest_pending(snapshot: Snapshot | None) -> dict[str, Any] | None:
    rows = (snapshot or {}).get("collectives", ())
    return next((row for row in rows if not row["done"]), None)


def _is_complete(snapshots: Mapping[int, Snapshot], pending: dict[str, Any]) -> bool:
    members = _members(snapshots, pending["group"])
    if not members:
        return False
    return all(_has_entered(snapshots.get(member), pending) for member in members)


def _members(snapshots: Mapping[int, Snapshot], group: str) -> list[int]:
    for snapshot in snapshots.values():
        found = (snapshot.get("groups") or {}).get(group)
        if found:
            return [int(rank) for rank in found]
    return []


def _has_entered(snapshot: Snapshot | None, pending: dict[str, Any]) -> bool:
    same = ("group", "sequence", "operation")
    rows = (snapshot or {}).get("collectives", ())
    return any(all(row[key] == pending[key] for key in same) for row in rows)


def read_snapshots(run_dir: RunDir, ranks: Iterable[int]) -> dict[int, Snapshot]:
    found: dict[int, Snapshot] = {}
    for rank in ranks:
        try:
            found[rank] = json.loads(run_dir.rank(rank).snapshot.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return found

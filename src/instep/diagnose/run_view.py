"""A run as the rules see it: its ranks, its hosts, and the stall that it was in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from instep.diagnose.broken_off import find_last_stall
from instep.diagnose.rank_view import Place, Position, RankView, is_process
from instep.diagnose.timed_out import find_timed_out
from instep.records.event import Event, read_events
from instep.records.recording import read_page
from instep.records.run_dir import RankDir, RunDir


@dataclass(frozen=True, eq=False)
class RunView:
    """Everything known of a run."""

    root: Path
    ranks: tuple[RankView, ...]
    stall: dict[str, Any] | None = None
    pairing: dict[str, Any] | None = None
    nodes: dict[str, Any] | None = None
    launch: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def by_rank(self) -> dict[int, RankView]:
        return {view.rank: view for view in self.ranks}

    @property
    def world_size(self) -> int:
        return next((view.page.world_size for view in self.ranks if view.page), len(self.ranks))

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Of a run on several nodes: the host of each rank."""
        rows = (self.nodes or {}).get("nodes", ())
        return {int(rank): str(row["host"]) for row in rows for rank in row["ranks"]}

    def name(self, rank: int) -> str:
        """`rank 3`, with its host in a run on several nodes."""
        return f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}"

    @property
    def is_whole(self) -> bool:
        """Whether there are notes of every rank: without them nothing can be said about what differs."""
        return len(self.ranks) == self.world_size and all(view.page is not None for view in self.ranks)

    @property
    def positions(self) -> list[Position]:
        return [view.position for view in self.ranks if view.position is not None]

    def stalled_rank(self, rank: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = (self.stall or {}).get("ranks", [])
        none: dict[str, Any] = {}
        return next((row for row in rows if row["rank"] == rank), none)

    def events(self, name: str) -> dict[int, list[Event]]:
        """Events of a name by rank; ranks without any are left out."""
        return {view.rank: found for view in self.ranks if (found := view.named(name))}

    def seconds_since(self, when: float) -> float:
        seen = (self.stall or {}).get("seen_at")
        return max(0.0, seen - when) if seen else 0.0


def read_run(root: Path) -> RunView:
    run_dir = RunDir(root)
    nodes, exits = read_json(run_dir.nodes), read_json(run_dir.exits) or {}
    places = _places(nodes) if nodes is not None else {}
    exits |= _exits_elsewhere(nodes) if nodes is not None else {}
    stall, pairing = read_json(run_dir.stall), read_json(run_dir.pairing)
    if stall is None:
        stall = _last_stall(run_dir)
    seen_at = stall.get("seen_at") if stall is not None else None
    ranks = tuple(
        _read_rank(rank, run_dir.rank(rank), exits.get(str(rank)), places.get(rank), seen_at)
        for rank in run_dir.ranks()
    )
    return RunView(root, ranks, stall, pairing, nodes, read_json(run_dir.launch) or {})


def _last_stall(run_dir: RunDir) -> dict[str, Any] | None:
    pages = {rank: page for rank in run_dir.ranks() if (page := read_page(run_dir.rank(rank).page)) is not None}
    alive = any(is_process(page.pid, page.started) for page in pages.values())
    failed = {rank: read_events(run_dir.rank(rank).events) for rank in pages if run_dir.rank(rank).failure.exists()}
    timed_out = find_timed_out(pages, failed)
    if timed_out is not None and not run_dir.nodes.exists():
        return timed_out
    return find_last_stall(pages, read_json(run_dir.exits), alive) if not run_dir.nodes.exists() else None


def _places(nodes: dict[str, Any]) -> dict[int, Place]:
    return {
        int(rank): Place(str(row["host"]), float(row.get("clock", 0.0)), rank in row.get("living", ()))
        for row in nodes["nodes"]
        if row["node"] != nodes["node"]
        for rank in row["ranks"]
    }


def _exits_elsewhere(nodes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in nodes["nodes"]:
        found |= row.get("exits") or {}
    return found


def _read_rank(
    rank: int, paths: RankDir, exit: dict[str, Any] | None, place: Place | None, seen_at: float | None
) -> RankView:
    return RankView(
        rank,
        read_page(paths.page),
        tuple(_by_our_clock(event, place) for event in read_events(paths.events)),
        read_json(paths.snapshot),
        read_json(paths.failure),
        read_text(paths.crash),
        read_text(paths.stacks),
        read_page(paths.mispaired_page),
        exit,
        place,
        None if seen_at is None else seen_at - (place.clock if place is not None else 0.0),
    )


def _by_our_clock(event: Event, place: Place | None) -> Event:
    return event if place is None else replace(event, time=event.time + place.clock)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""What is known of the ranks of this machine at one moment. Written by `watch`, judged by `decide`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from instep.records.launch_spec import RankPlace

StopReason = Literal["failed", "interrupted", "terminated", "stalled", "agent", "launcher"]


@dataclass
class RankState:
    """error: what the rank told of its exception (worker_entry.describe); exit_code: negative for a signal."""

    place: RankPlace
    key: str
    pid: int | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    peak_bytes: int = 0
    error: dict[str, Any] | None = None
    error_at: float | None = None

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def failed(self) -> bool:
        return self.exit_code not in (None, 0)


@dataclass
class Stop:
    """An end that was asked for. sent: the signals that went out already."""

    reason: StopReason
    since: float
    sent: list[int] = field(default_factory=list[int])
    signal: int | None = None
    hurry: bool = False


@dataclass
class GroupState:
    """restarts_left: how often the whole group may be started again after a failure."""

    ranks: list[RankState]
    restart: int = 0
    restarts_left: int = 0
    stop: Stop | None = None
    shutdown_seconds: float | None = None

    @property
    def living(self) -> list[RankState]:
        return [rank for rank in self.ranks if rank.alive]

    @property
    def failures(self) -> list[RankState]:
        """Ranks that did not end well by themselves, the first to end first."""
        failed = [rank for rank in self.ranks if rank.failed]
        return sorted(failed, key=lambda rank: rank.ended_at or 0.0)

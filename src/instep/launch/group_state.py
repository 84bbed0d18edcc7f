"""What is known of the ranks of this machine at one moment. Written by `watch`, judged by `decide`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from instep.records.launch_spec import RankPlace

if TYPE_CHECKING:
    from instep.launch.link.sharing import Sharing

StopReason = Literal["failed", "interrupted", "terminated", "stalled", "asked", "lost", "node_lost"]


@dataclass
class RankState:
    """error: what the rank told of its exception (worker_entry.describe); exit_site: where it called sys.exit;
    exit_code: negative for a signal; times are seconds since the epoch."""

    place: RankPlace
    key: str
    pid: int | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    peak_bytes: int = 0
    error: dict[str, Any] | None = None
    exit_site: dict[str, Any] | None = None
    announced: bool = False

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def failed(self) -> bool:
        return self.exit_code not in (None, 0)

    @property
    def failed_at(self) -> float:
        """When it went wrong: its exception if it told of one, else its end."""
        return self.error["time"] if self.error is not None else self.ended_at or 0.0


@dataclass
class Stop:
    """An end that was asked for. sent: the signals that went out already; hurry: no grace any more."""

    reason: StopReason
    since: float
    sent: list[int] = field(default_factory=list[int])
    signal: int | None = None
    grace_seconds: float | None = None
    hurry: bool = False


@dataclass
class AgentState:
    """torch's agent, where there is one. asked_at: when it began to meet the other nodes; told: whether it knows of
    the ranks' end; end: how its own work ended; elsewhere: the rank of another node that failed first."""

    asked_at: float
    running: bool = False
    told: bool = False
    end: Literal["done", "failed", "lost"] | None = None
    message: str = ""
    elsewhere: str = ""


@dataclass
class GroupState:
    """restarts_left: how often the whole group may be started again here; with an agent that is the agent's matter;
    sharing: with the launchers of other nodes."""

    ranks: list[RankState]
    restart: int = 0
    restarts_left: int = 0
    stop: Stop | None = None
    shutdown_seconds: float | None = None
    agent: AgentState | None = None
    sharing: Sharing | None = None

    @property
    def living(self) -> list[RankState]:
        return [rank for rank in self.ranks if rank.alive]

    @property
    def failures(self) -> list[RankState]:
        """Ranks that did not end well, the first to fail first."""
        return sorted((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.failed_at)

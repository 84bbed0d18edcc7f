"""Whether ranks have stalled: pure judgement over what was seen of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# Nobody waits for it, so that only its own habit tells whether it takes long: times of `stall_after`, and of the longest
# pause that it has made before.
PREPARING_TIMES = 10.0
LONGEST_PAUSE_TIMES = 3.0

OwnWork = Literal["unknown", "idle", "preparing", "computing"]


@dataclass(frozen=True)
class Sight:
    """One rank as it is now. waits_in: what kind of collective it waits in, and the number of that collective;
    own_work: whether it uses a processor meanwhile, before or after its first optimizer step; unknown for a rank that has
    not begun or has come to its end; longest_pause: that it has made so far."""

    rank: int
    alive: bool
    progressed_at: float
    waits_in: tuple[str, int] | None = None
    own_work: OwnWork = "unknown"
    longest_pause: float = 0.0


@dataclass(frozen=True)
class Stall:
    """since: when the last rank made progress; proven: no rank can ever go on; ended: ranks that are no longer there."""

    since: float
    waiting: tuple[int, ...]
    outside: tuple[int, ...]
    proven: bool
    ended: tuple[int, ...] = ()


def judge(sights: Iterable[Sight], now: float, stall_after: float) -> Stall | None:
    """The stall that these ranks are in, if any."""
    sights = list(sights)
    alive = [sight for sight in sights if sight.alive]
    if not alive:
        return None
    waiting = [sight for sight in alive if sight.waits_in is not None]
    since = max(sight.progressed_at for sight in alive)
    if now - since < (stall_after if waiting else _patience(alive, stall_after)):
        return None
    outside = tuple(sight.rank for sight in alive if sight.waits_in is None)
    places = {sight.waits_in for sight in waiting}
    proven = not outside and (len(places) > 1 or len(alive) < len(sights))
    ended = tuple(sight.rank for sight in sights if not sight.alive)
    return Stall(since, tuple(sight.rank for sight in waiting), outside, proven, ended)


def _patience(sights: list[Sight], stall_after: float) -> float:
    """How long ranks may go without progress while nobody waits for them."""
    return max(_patience_with(sight, stall_after) for sight in sights)


def _patience_with(sight: Sight, stall_after: float) -> float:
    if sight.own_work == "unknown":
        return float("inf")
    if sight.own_work == "idle":
        return stall_after
    if sight.own_work == "preparing":
        return PREPARING_TIMES * stall_after
    return max(stall_after, LONGEST_PAUSE_TIMES * sight.longest_pause)

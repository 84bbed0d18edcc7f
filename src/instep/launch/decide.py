"""What to do next, from what is known: pure judgement, tested without processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from instep.launch.exits import is_consequence, shell_code
from instep.launch.group_state import GroupState, RankState, Stop

SETTLE_SECONDS = 0.15  # after a failure, for the errors of the others to come in
SETTLE_CONSEQUENCE_SECONDS = 2.0  # when the first failure only echoes another, which may still be dumping its core
FAILED_GRACE_SECONDS = 5.0  # for the other ranks after a failure, unless --shutdown-timeout says otherwise
TERMINATE_GRACE_SECONDS = 30.0  # to save after SIGTERM (torchrun's value)

_EXIT_CODES = {"interrupted": 130, "terminated": 143, "stalled": 124}


@dataclass(frozen=True)
class Wait:
    """Nothing to do before something happens or `seconds` have passed."""

    seconds: float


@dataclass(frozen=True)
class BeginStop:
    reason: str = "failed"


@dataclass(frozen=True)
class Send:
    """A signal for every living rank and its group."""

    number: int


@dataclass(frozen=True)
class Restart:
    pass


@dataclass(frozen=True)
class Finish:
    code: int


Decision = Wait | BeginStop | Send | Restart | Finish


def decide(group: GroupState, now: float) -> Decision:
    if group.stop is not None:
        return _go_on_stopping(group, group.stop, now)
    if not group.living and not group.failures:
        return Finish(0)
    if group.failures:
        first = group.failures[0]
        settle = SETTLE_CONSEQUENCE_SECONDS if _echoes_another(group) else SETTLE_SECONDS
        ready_at = (first.ended_at or now) + settle
        if now >= ready_at or not group.living:
            return BeginStop()
        return Wait(ready_at - now)
    return Wait(1.0)


def _go_on_stopping(group: GroupState, stop: Stop, now: float) -> Decision:
    if not group.living:
        if stop.reason == "failed" and group.restarts_left > 0:
            return Restart()
        return Finish(exit_code(group))
    for after, number in _escalation(group, stop):
        if number in stop.sent:
            continue
        if stop.hurry or now >= stop.since + after:
            return Send(number)
        return Wait(stop.since + after - now)
    return Wait(1.0)


def _escalation(group: GroupState, stop: Stop) -> list[tuple[float, int]]:
    """Seconds after the stop began, and the signal that is due then."""
    if stop.hurry:
        return [(0.0, signal.SIGKILL)]
    if stop.reason == "interrupted":
        # A rank blocked in a collective cannot handle SIGINT; one that handles SIGTERM in Python cannot do that either.
        return [(0.0, signal.SIGINT), (1.0, signal.SIGTERM), (2.0, signal.SIGKILL)]
    if stop.reason == "terminated":
        grace = TERMINATE_GRACE_SECONDS if group.shutdown_seconds is None else group.shutdown_seconds
        return [(0.0, stop.signal or signal.SIGTERM), (grace, signal.SIGKILL)]
    grace = FAILED_GRACE_SECONDS if group.shutdown_seconds is None else group.shutdown_seconds
    return [(0.0, signal.SIGTERM), (grace, signal.SIGKILL)]


def exit_code(group: GroupState) -> int:
    """Ours, by the table in the design: the guilty rank's, or that of how the run was stopped."""
    stop = group.stop
    if stop is not None and stop.reason in _EXIT_CODES:
        return _EXIT_CODES[stop.reason]
    guilty = first_guilty(group)
    if guilty is None:
        return 0 if stop is None else 1
    if guilty.error is not None and guilty.error["is_usage"]:
        return guilty.error["exit_code"]
    return shell_code(guilty.exit_code or 0)


def first_guilty(group: GroupState) -> RankState | None:
    """The rank whose failure is not the echo of another's, the first if there are several; any if all are echoes.

    Ranks that we have ended ourselves are never guilty.
    """
    failures = [rank for rank in group.failures if not _was_ended_by_us(group, rank)]
    own = [rank for rank in failures if not is_consequence(rank.error)]
    return (own or failures or [None])[0]


def _was_ended_by_us(group: GroupState, rank: RankState) -> bool:
    stop = group.stop
    return (
        stop is not None
        and bool(stop.sent)
        and (rank.ended_at or 0.0) > stop.since
        and rank.error is None
        and (-(rank.exit_code or 0) in stop.sent)
    )


def _echoes_another(group: GroupState) -> bool:
    return all(is_consequence(rank.error) for rank in group.failures)

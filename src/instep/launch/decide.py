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
EXIT_NODES_LOST = 69
_EXIT_CODES = {"interrupted": 130, "terminated": 143, "stalled": 124, "node_lost": EXIT_NODES_LOST}


@dataclass(frozen=True)
class Wait:
    """Nothing to do before something happens or `seconds` have passed."""

    seconds: float


@dataclass(frozen=True)
class BeginStop:
    """The others have to end, since one has failed."""


@dataclass(frozen=True)
class Send:
    """A signal for every living rank and its group."""

    number: int


@dataclass(frozen=True)
class Restart:
    """The whole group once more."""


@dataclass(frozen=True)
class TellAgent:
    """Every rank has ended; torch's agent decides what follows."""


@dataclass(frozen=True)
class Finish:
    code: int


Decision = Wait | BeginStop | Send | Restart | TellAgent | Finish


def decide(group: GroupState, now: float) -> Decision:
    if group.stop is not None and group.living:
        return _escalate(group, group.stop, now)
    if group.failures and group.living:
        return _settle(group, now)
    if group.living:
        return Wait(1.0)
    return _after_the_last(group)


def _settle(group: GroupState, now: float) -> Decision:
    echo = all(is_consequence(rank.error) for rank in group.failures)
    ended = min(rank.ended_at or now for rank in group.failures)
    ready_at = ended + (SETTLE_CONSEQUENCE_SECONDS if echo else SETTLE_SECONDS)
    return BeginStop() if now >= ready_at else Wait(ready_at - now)


def _escalate(group: GroupState, stop: Stop, now: float) -> Decision:
    for after, number in _escalation(group, stop):
        if number in stop.sent:
            continue
        return Send(number) if now >= stop.since + after else Wait(stop.since + after - now)
    return Wait(1.0)


def _escalation(group: GroupState, stop: Stop) -> list[tuple[float, int]]:
    """Seconds after the stop began, and the signal that is due then."""
    if stop.hurry:
        return [(0.0, signal.SIGKILL)]
    if stop.reason == "interrupted":
        # A rank blocked in a collective cannot handle SIGINT; one that handles SIGTERM in Python cannot do that either.
        return [(0.0, signal.SIGINT), (1.0, signal.SIGTERM), (2.0, signal.SIGKILL)]
    usual = TERMINATE_GRACE_SECONDS if stop.reason == "terminated" else FAILED_GRACE_SECONDS
    grace = next(seconds for seconds in (group.shutdown_seconds, stop.grace_seconds, usual) if seconds is not None)
    return [(0.0, stop.signal or signal.SIGTERM), (grace, signal.SIGKILL)]


def _after_the_last(group: GroupState) -> Decision:
    """No rank lives: none was started yet, or all have ended."""
    agent, stop = group.agent, group.stop
    if stop is not None and stop.reason in ("interrupted", "terminated", "stalled", "lost", "node_lost"):
        return Finish(exit_code(group))
    if agent is not None:
        if agent.end is not None:
            return Finish(exit_code(group))
        return TellAgent() if group.ranks and not agent.told else Wait(1.0)
    if group.failures and group.restarts_left > 0:
        return Restart()
    return Finish(exit_code(group))


def exit_code(group: GroupState) -> int:
    """Ours, by the table in the design: the guilty rank's, or that of how the run was stopped."""
    stop, agent = group.stop, group.agent
    if stop is not None and stop.reason in _EXIT_CODES:
        return _EXIT_CODES[stop.reason]
    guilty = first_guilty(group)
    if guilty is not None:
        if guilty.error is not None and guilty.error["is_usage"]:
            return guilty.error["exit_code"]
        return shell_code(own_exit_code(group, guilty))
    if agent is not None and agent.end != "done":
        return EXIT_NODES_LOST
    return 1 if stop is not None and stop.reason == "lost" else 0


def first_guilty(group: GroupState) -> RankState | None:
    """The rank whose failure is not the echo of another's, the first if there are several; any if all are echoes.

    Ranks that we have ended ourselves are never guilty.
    """
    failures = [rank for rank in group.failures if not was_ended_by_us(group, rank)]
    own = [rank for rank in failures if not is_consequence(rank.error)]
    return (own or failures or [None])[0]


def own_exit_code(group: GroupState, rank: RankState) -> int:
    """A failed rank's exit code; 1 when it had raised and our signal came before its process was gone."""
    code = rank.exit_code or 0
    hit = rank.error is not None and group.stop is not None and -code in group.stop.sent
    return 1 if hit else code


def was_ended_by_us(group: GroupState, rank: RankState) -> bool:
    """Whether a rank ended by a signal that we sent, not by a fault of its own."""
    stop = group.stop
    return stop is not None and rank.error is None and -(rank.exit_code or 0) in stop.sent

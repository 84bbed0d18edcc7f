"""What the launcher does next, without processes."""

from __future__ import annotations

import signal
from typing import Any

from instep.launch.decide import (
    FAILED_GRACE_SECONDS,
    SETTLE_CONSEQUENCE_SECONDS,
    SETTLE_SECONDS,
    BeginStop,
    Finish,
    Restart,
    Send,
    TellAgent,
    Wait,
    decide,
    first_guilty,
)
from instep.launch.group_state import AgentState, GroupState, RankState, Stop
from instep.records.launch_spec import RankPlace

PEER_GONE = "Connection closed by peer [127.0.0.1]:1"


def make_rank(number: int, code: int | None = None, at: float = 0.0, error: dict[str, Any] | None = None) -> RankState:
    place = RankPlace(number, number, {"WORLD_SIZE": "2"})
    return RankState(place, f"0.{number}", 100 + number, code, None if code is None else at, error=error)


def make_error(text: str, kind: str = "RuntimeError", at: float = 0.0, **more: Any) -> dict[str, Any]:
    plain = {"time": at, "type": kind, "message": text, "text": text, "where": None, "is_usage": False, "exit_code": 1}
    return plain | more


def signals(group: GroupState, start: float, seconds: float) -> list[tuple[float, int]]:
    """What is sent when, if no rank ever ends."""
    sent = []
    now = start
    while now <= start + seconds:
        decision = decide(group, now)
        if isinstance(decision, Send):
            assert group.stop is not None
            group.stop.sent.append(decision.number)
            sent.append((round(now - start, 2), decision.number))
            continue
        assert isinstance(decision, Wait)
        now += max(decision.seconds, 0.01)
    return sent


def test_waits_while_ranks_run() -> None:
    assert isinstance(decide(GroupState([make_rank(0), make_rank(1, 0)]), 0.0), Wait)


def test_ends_well_when_all_ended_well() -> None:
    assert decide(GroupState([make_rank(0, 0), make_rank(1, 0)]), 0.0) == Finish(0)


def test_gives_the_others_a_moment_after_a_failure() -> None:
    group = GroupState([make_rank(0), make_rank(1, 1, at=10.0, error=make_error("bad", at=10.0))])
    assert isinstance(decide(group, 10.0), Wait)
    assert decide(group, 10.0 + SETTLE_SECONDS) == BeginStop()


def test_waits_longer_for_the_cause_of_an_echo() -> None:
    group = GroupState([make_rank(0, 1, at=10.0, error=make_error(PEER_GONE, at=10.0)), make_rank(1)])
    assert isinstance(decide(group, 10.5), Wait)
    assert decide(group, 10.0 + SETTLE_CONSEQUENCE_SECONDS) == BeginStop()


def test_the_guilty_rank_is_not_the_first_echo() -> None:
    group = GroupState([make_rank(0, 1, at=1.0, error=make_error(PEER_GONE, at=1.0)), make_rank(1, -11, at=2.0)])
    guilty = first_guilty(group)
    assert guilty is not None and guilty.place.rank == 1
    assert decide(group, 3.0) == Finish(128 + 11)


def test_a_rank_that_we_have_ended_is_not_guilty() -> None:
    stop = Stop("failed", 2.0, sent=[signal.SIGTERM])
    group = GroupState([make_rank(0, -15, at=1.5), make_rank(1, 3, at=2.5)], stop=stop)
    assert decide(group, 3.0) == Finish(3)


def test_a_usage_error_has_its_own_code() -> None:
    error = make_error("no", "UsageError", is_usage=True, exit_code=2)
    assert decide(GroupState([make_rank(0, 1, error=error)]), 1.0) == Finish(2)


def test_ctrl_c_escalates_within_three_seconds() -> None:
    group = GroupState([make_rank(0)], stop=Stop("interrupted", 0.0, signal=signal.SIGINT))
    assert signals(group, 0.0, 3.0) == [(0.0, signal.SIGINT), (1.0, signal.SIGTERM), (2.0, signal.SIGKILL)]


def test_a_second_ctrl_c_kills_at_once() -> None:
    group = GroupState([make_rank(0)], stop=Stop("interrupted", 0.0, sent=[signal.SIGINT], hurry=True))
    assert decide(group, 0.1) == Send(signal.SIGKILL)


def test_sigterm_leaves_time_to_save() -> None:
    group = GroupState([make_rank(0)], stop=Stop("terminated", 0.0, signal=signal.SIGTERM))
    assert signals(group, 0.0, 31.0) == [(0.0, signal.SIGTERM), (30.0, signal.SIGKILL)]


def test_shutdown_timeout_is_the_grace_after_a_failure_too() -> None:
    stop = Stop("failed", 0.0)
    assert signals(GroupState([make_rank(0)], stop=stop), 0.0, 9.0)[-1] == (FAILED_GRACE_SECONDS, signal.SIGKILL)
    group = GroupState([make_rank(0)], stop=Stop("failed", 0.0), shutdown_seconds=1)
    assert signals(group, 0.0, 9.0)[-1] == (1.0, signal.SIGKILL)


def test_exit_codes_of_stops() -> None:
    codes = {}
    for reason in ("interrupted", "terminated", "stalled", "lost"):
        codes[reason] = decide(GroupState([make_rank(0, -9, at=1.0)], stop=Stop(reason, 0.0, sent=[9])), 2.0)
    assert codes == {"interrupted": Finish(130), "terminated": Finish(143), "stalled": Finish(124), "lost": Finish(1)}


def test_restarts_as_often_as_allowed() -> None:
    failed = [make_rank(0, 1, error=make_error("bad"))]
    assert decide(GroupState(failed, restarts_left=1), 1.0) == Restart()
    assert decide(GroupState(failed, restarts_left=0), 1.0) == Finish(1)


def test_does_not_restart_after_ctrl_c() -> None:
    group = GroupState([make_rank(0, -2)], restarts_left=3, stop=Stop("interrupted", 0.0, sent=[2]))
    assert decide(group, 1.0) == Finish(130)


def test_an_agent_decides_what_follows_an_end() -> None:
    agent = AgentState(0.0, running=True)
    group = GroupState([make_rank(0, 1, error=make_error("bad"))], restarts_left=3, agent=agent)
    assert decide(group, 1.0) == TellAgent()
    agent.told = True
    assert isinstance(decide(group, 1.0), Wait)
    agent.end = "done"
    assert decide(group, 1.0) == Finish(1)


def test_waits_for_the_agent_before_the_first_rank() -> None:
    assert isinstance(decide(GroupState([], agent=AgentState(0.0)), 1.0), Wait)


def test_nodes_that_did_not_meet_have_their_own_code() -> None:
    assert decide(GroupState([], agent=AgentState(0.0, end="failed")), 1.0) == Finish(69)


def test_a_signal_after_its_exception_does_not_change_a_ranks_code() -> None:
    stop = Stop("failed", 1.0, sent=[signal.SIGTERM])
    group = GroupState([make_rank(0, -15, at=2.0, error=make_error("bad"))], stop=stop)
    assert decide(group, 3.0) == Finish(1)

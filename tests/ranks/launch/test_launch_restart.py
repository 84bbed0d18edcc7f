"""With --max-restarts all ranks start again after a failure, and meet as if there had been none before."""

from __future__ import annotations

from launching import SCRIPTS, Launcher


def test_ranks_of_a_further_attempt_do_not_meet_those_of_the_one_before(launch: Launcher) -> None:
    run = launch.run("-n", "3", "--max-restarts", "2", str(SCRIPTS / "meets_again.py"))
    assert run.code == 0, run.err
    assert run.out.count("met again in attempt 2") == 3
    assert run.err.count("restart 1 of 2") == 1
    assert run.err.count("restart 2 of 2") == 1

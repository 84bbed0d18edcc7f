"""The last words on a failed run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from instep.launch.exits import describe_exit, is_consequence
from instep.launch.failure import describe_failure, find_crash, keep_failures, name_ranks, read_crash_site
from instep.launch.group_state import GroupState, RankState
from instep.launch.memory_facts import MemoryFacts, explain_kill, read_memory_facts
from instep.records.launch_spec import RankPlace
from instep.records.run_dir import RunDir

HOST = socket.gethostname()
GONE = "[pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
WHERE = {"file": "train.py", "line": 12, "source": "loss.backward()"}


def failed(number: int, code: int, at: float = 1.0, size: int = 4, **error: Any) -> RankState:
    state = RankState(RankPlace(number, number, {"WORLD_SIZE": str(size)}), str(number), 1, code, at)
    if error:
        plain = {"time": at, "where": WHERE, "is_usage": False, "exit_code": 1, "printed": False}
        state.error = plain | {"text": f"Traceback\n{error['type']}: {error['message']}\n"} | error
    return state


def test_the_guilty_ranks_traceback_comes_last(tmp_path: Path) -> None:
    ranks = [
        failed(0, 1, 1.0, type="RuntimeError", message=GONE),
        failed(1, 1, 1.2, type="ValueError", message="bad"),
        failed(2, 1, 1.1, type="RuntimeError", message=GONE),
        failed(3, 1, 1.3, type="DistBackendError", message="NCCL communicator was aborted"),
    ]
    assert describe_failure(GroupState(ranks), RunDir(tmp_path)).splitlines() == [
        "instep: ranks 0 and 2 failed because of it: RuntimeError, connection closed by peer",
        "instep: rank 3 failed because of it: DistBackendError, nccl communicator was aborted",
        f"instep: rank 1 on {HOST} ended with exit code 1",
        "Traceback",
        "ValueError: bad",
    ]


def test_a_rank_that_waited_in_shared_memory_says_so_in_words(tmp_path: Path) -> None:
    gone = "rank 1 does not come to bucket 0: its process 7 has ended"
    ranks = [failed(0, 1, 1.1, type="RuntimeError", message=gone), failed(1, 1, type="KeyError", message="'x'")]
    first = describe_failure(GroupState(ranks), RunDir(tmp_path)).splitlines()[0]
    assert first == "instep: rank 0 failed because of it: RuntimeError, a rank that it waited for has gone"


def test_equal_errors_are_told_once(tmp_path: Path) -> None:
    ranks = [failed(number, 1, type="KeyError", message=f"'x' of rank{number} at 0x7f{number}") for number in range(3)]
    text = describe_failure(GroupState(ranks), RunDir(tmp_path))
    assert text.startswith(f"instep: ranks 0-2 on {HOST} ended with exit code 1\nTraceback\n")
    assert text.count("KeyError") == 1


def test_a_traceback_that_was_shown_while_the_process_ended_is_not_shown_again(tmp_path: Path) -> None:
    rank = failed(0, 1, type="KeyError", message="'x'")
    rank.announced = True
    assert describe_failure(GroupState([rank]), RunDir(tmp_path)).splitlines() == [
        f"instep: rank 0 on {HOST} ended with exit code 1",
        "KeyError: 'x'",
        "  at train.py:12: loss.backward()",
    ]


def test_another_error_is_named_beside_the_first(tmp_path: Path) -> None:
    ranks = [failed(0, 1, type="KeyError", message="'x'"), failed(1, 1, 1.1, type="OSError", message="no disk")]
    first = describe_failure(GroupState(ranks), RunDir(tmp_path)).splitlines()[0]
    assert first == "instep: rank 1 failed too: OSError: no disk"


def test_a_usage_error_is_one_sentence_and_the_users_line(tmp_path: Path) -> None:
    error = {"type": "UsageError", "message": "3 does not divide 8.", "is_usage": True, "exit_code": 2}
    ranks = [failed(number, 2, **error) for number in range(2)]
    assert describe_failure(GroupState(ranks), RunDir(tmp_path)).splitlines() == [
        f"instep: ranks 0, 1 on {HOST} stopped:".replace("0, 1", "0 and 1"),
        "UsageError: 3 does not divide 8.",
        "  at train.py:12: loss.backward()",
    ]


def test_an_exit_is_shown_with_its_place(tmp_path: Path) -> None:
    rank = failed(0, 3, size=1)
    rank.exit_site = {"file": "train.py", "line": 5, "source": "sys.exit(3)"}
    expected = f"instep: rank 0 on {HOST} ended with exit code 3, at train.py:5: sys.exit(3)\n"
    assert describe_failure(GroupState([rank]), RunDir(tmp_path)) == expected


def test_a_rank_that_left_early_is_named_for_the_echo(tmp_path: Path) -> None:
    left = RankState(RankPlace(1, 1, {"WORLD_SIZE": "2"}), "1", 1, 0, 0.5)
    group = GroupState([failed(0, 1, size=2, type="RuntimeError", message=GONE), left])
    assert describe_failure(group, RunDir(tmp_path)).startswith("instep: rank 1 had ended before, with exit code 0\n")


def test_the_cause_may_be_on_another_machine(tmp_path: Path) -> None:
    group = GroupState([failed(0, 1, size=2, type="RuntimeError", message=GONE)])
    assert "the rank that failed first is on another machine" in describe_failure(group, RunDir(tmp_path))


def test_a_segfault_has_its_python_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import ctypes\nctypes.string_at(0)\n")
    folder = RunDir(tmp_path).rank(0)
    folder.root.mkdir()
    folder.crash.write_text(
        "Fatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n"
        '  File "/other.py", line 9 in wait\n\nCurrent thread 0x02 (most recent call first):\n'
        f'  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
        f'  File "{script}", line 2 in <module>\n'
    )
    site = read_crash_site(folder.crash)
    assert site is not None and (site.file, site.line, site.source) == (str(script), 2, "ctypes.string_at(0)")
    finding = find_crash(GroupState([failed(0, -11, size=1)]), RunDir(tmp_path), MemoryFacts(), MemoryFacts())
    assert finding is not None and finding.id == "crash/signal" and finding.where == site


def test_a_kill_for_memory_is_known_by_the_cgroup(tmp_path: Path) -> None:
    before, after = MemoryFacts(oom_kills=1, limit_bytes=2 << 30), MemoryFacts(oom_kills=2, limit_bytes=2 << 30)
    rank = failed(0, -9, size=1)
    rank.peak_bytes = 1 << 30
    finding = find_crash(GroupState([rank]), RunDir(tmp_path), before, after)
    assert finding is not None and finding.id == "memory/killed"
    assert finding.cause == ("The cgroup's memory limit of 2.0 GiB was reached, and the kernel killed for it 1 time.")
    assert any("rank 0 had used 1.0 GiB at most" in evidence.fact for evidence in finding.evidence)


def test_a_kill_is_not_blamed_on_memory_without_proof() -> None:
    assert explain_kill(MemoryFacts(oom_kills=1), MemoryFacts(oom_kills=1)) is None
    assert explain_kill(MemoryFacts(), MemoryFacts(oom_kills=1)) is None


def test_reads_the_facts_of_both_cgroup_versions(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    membership = tmp_path / "cgroup"
    membership.write_text("12:memory:/job\n1:name=systemd:/x\n0::/\n")
    facts = read_memory_facts(tmp_path, membership)
    assert (facts.oom_kills, facts.limit_bytes) == (2, 1048576)
    folder = tmp_path / "old" / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    (folder / "memory.limit_in_bytes").write_text("4096\n")
    facts = read_memory_facts(tmp_path / "old", membership)
    assert (facts.oom_kills, facts.limit_bytes) == (7, 4096)
    assert read_memory_facts(tmp_path / "none", membership).oom_kills is None


def test_leaves_failures_in_the_ranks_folders(tmp_path: Path) -> None:
    for number in (0, 1):
        RunDir(tmp_path).rank(number).root.mkdir()
    keep_failures(GroupState([failed(0, 1, type="ValueError", message="bad")]), RunDir(tmp_path))
    assert '"exit_code": 1' in RunDir(tmp_path).rank(0).failure.read_text()
    assert not RunDir(tmp_path).rank(1).failure.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL, which nothing can catch"),
        (-11, "crashed with SIGSEGV, an access to memory that is not its own"),
        (-15, "was ended by SIGTERM"),
        (-40, "was ended by signal 40"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_a_users_own_error_is_no_echo() -> None:
    assert is_consequence({"type": "RuntimeError", "message": GONE})
    assert not is_consequence({"type": "ValueError", "message": GONE})
    assert not is_consequence({"type": "RuntimeError", "message": "shape mismatch"})


def test_names_ranks_shortly() -> None:
    assert [name_ranks([3]), name_ranks([0, 1]), name_ranks([0, 1, 2, 5])] == [
        "rank 3",
        "ranks 0 and 1",
        "ranks 0-2 and 5",
    ]

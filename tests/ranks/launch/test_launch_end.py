"""However a run ends, and whoever is killed, nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from instep.launch.linux import list_children
from launching import Launcher, Watched

# Two ranks blocked in a collective that the third does not enter, each with a grandchild of its own session.
BLOCKED = """
import multiprocessing, os, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
open(f"ready{dist.get_rank()}", "w").close()
dist.barrier() if dist.get_rank() else time.sleep(600)
"""
# The same without torch, for whom it does not matter.
SLEEPING = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open("ready" + os.environ["RANK"], "w").close()
time.sleep(600)
"""
STUBBORN = """
import os, signal, time
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
open("ready" + os.environ["RANK"], "w").close()
time.sleep(600)
"""
SAVING = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    open("saved" + os.environ["RANK"], "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open("ready" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.1)
"""


def begin(launch: Launcher, text: str, *words: str, num_ranks: int = 2) -> subprocess.Popen[str]:
    process = launch.begin("-n", str(num_ranks), *words, launch.script(text))
    try:
        launch.await_file("ready", num_ranks)
    except AssertionError as error:
        process.kill()
        raise AssertionError("\n".join((str(error), *process.communicate()))) from error
    return process


def test_ctrl_c_ends_blocked_ranks_and_their_children_within_three_seconds(launch: Launcher) -> None:
    process = begin(launch, BLOCKED)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = launch.finish(process)
    seconds = time.monotonic() - start
    assert (ended.code, launch.await_gone(0.0)) == (130, [])
    assert "instep: stopped by Ctrl-C" in ended.err_lines
    assert seconds < 3.0 + os.getloadavg()[0] / (os.cpu_count() or 1) / 4  # the machine may be busy with other work


def test_ctrl_c_works_while_nobody_takes_the_output(launch: Launcher) -> None:
    text = "import os\nopen('ready' + os.environ['RANK'], 'w').close()\nwhile True:\n    print('x' * 1000)\n"
    process = begin(launch, text, num_ranks=1)
    time.sleep(1.0)  # the pipe to us is full by now
    process.send_signal(signal.SIGINT)
    process.wait(20)
    ended = launch.finish(process)
    assert ended.code == 130


def test_nohup_keeps_a_run_alive(launch: Launcher) -> None:
    text = "import os, time\nopen('ready' + os.environ['RANK'], 'w').close()\ntime.sleep(1)\nprint('done')\n"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = begin(launch, text, num_ranks=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    ended = launch.finish(process)
    assert (ended.code, ended.out) == (0, "done\n")


def test_a_second_ctrl_c_ends_at_once(launch: Launcher) -> None:
    process = begin(launch, STUBBORN)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert launch.finish(process).code == 130
    assert time.monotonic() - start < 1.2 + os.getloadavg()[0] / (os.cpu_count() or 1) / 4


def test_sigterm_leaves_ranks_time_to_save(launch: Launcher) -> None:
    process = begin(launch, SAVING)
    process.terminate()
    ended = launch.finish(process)
    assert ended.code == 143
    assert sorted(path.name for path in launch.folder.glob("saved*")) == ["saved0", "saved1"]


def test_sigterm_kills_after_the_shutdown_timeout(launch: Launcher) -> None:
    process = begin(launch, STUBBORN, "--shutdown-timeout", "1")
    process.terminate()
    assert launch.finish(process, 20).code == 143


def test_a_signal_of_the_users_choice_ends_the_run(launch: Launcher) -> None:
    process = begin(launch, SLEEPING, "--signals-to-handle", "SIGUSR1,SIGTERM")
    process.send_signal(signal.SIGUSR1)
    assert launch.finish(process).code == 143


def find_process(process: subprocess.Popen[str], who: str) -> int:
    """One of the launcher's processes: by its parent and what it runs."""
    if who == "launcher":
        return process.pid
    zygote = next(pid for pid in list_children(process.pid) if b"start.py\0zygote" in read_arguments(pid))
    if who == "zygote":
        return zygote
    children = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in list_children(zygote)}
    ranks = [pid for pid in children if open_files(pid) & {"crash.txt"}]
    return min(ranks) if who == "rank" else next(pid for pid in children if pid not in ranks)


def read_arguments(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def open_files(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    return {os.path.basename(os.readlink(path)) for path in folder.iterdir() if path.is_symlink()}


@pytest.mark.parametrize(
    ("who", "code"), [("launcher", -9), ("zygote", 1), ("store", 1), ("rank", 137)], ids=lambda value: str(value)
)
def test_a_killed_process_takes_everything_with_it(launch: Launcher, who: str, code: int) -> None:
    process = begin(launch, SLEEPING)
    os.kill(find_process(process, who), signal.SIGKILL)
    ended = launch.finish(process, 30)
    assert ended.code == code, ended.err
    assert launch.await_gone(10.0) == []


def test_a_killed_agent_takes_everything_with_it(launch: Launcher) -> None:
    process = begin(launch, SLEEPING, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    os.kill(find_process(process, "agent"), signal.SIGKILL)
    ended = launch.finish(process, 30)
    assert ended.code != 0
    assert "torch's agent has died" in ended.err
    assert launch.await_gone(10.0) == []


def test_both_guardians_killed_together_leave_no_rank(launch: Launcher) -> None:
    process = begin(launch, SLEEPING.replace("child =", "pass #"))
    zygote = find_process(process, "zygote")
    process.send_signal(signal.SIGSTOP)
    os.kill(zygote, signal.SIGKILL)
    process.kill()
    launch.finish(process, 30)
    assert launch.await_gone(10.0) == []


def test_fresh_ranks_die_with_the_launcher_too(launch: Launcher) -> None:
    process = begin(launch, SLEEPING, "--no-fork", num_ranks=1)
    process.kill()
    launch.finish(process, 30)
    assert launch.await_gone(10.0) == []


def test_what_ranks_left_running_is_ended_and_named(watched: Watched) -> None:
    program = watched.script("import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n")
    ended = watched.run(program)
    assert ended.code == 0
    assert ended.err == "instep: ended what the ranks had left running: sleep 600\n"


def test_helpers_that_end_by_themselves_are_not_named(watched: Watched) -> None:
    text = "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=10)\n"
    before = set(os.listdir("/dev/shm"))
    ended = watched.run(watched.script(text))
    assert "ended what" not in ended.err
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("psm_")} == set()


def test_a_failure_ends_the_other_ranks(watched: Watched) -> None:
    program = watched.script(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('bad')\ntime.sleep(600)\n"
    )
    start = time.monotonic()
    ended = watched.run(program, 3)
    assert (ended.code, time.monotonic() - start < 10) == (1, True)
    assert ended.err.splitlines()[-1] == "ValueError: bad"


def test_a_rank_that_ignores_sigterm_is_killed_after_a_failure(watched: Watched) -> None:
    text = STUBBORN.replace("time.sleep(600)", "time.sleep(600) if os.environ['RANK'] == '0' else 1 / 0")
    program = watched.script(text.replace('open("ready"', f'open("{watched.folder}/ready"'))
    assert watched.run(program, 2, "--shutdown-timeout", "1").code == 1


def test_restarts_and_succeeds(watched: Watched) -> None:
    text = "import os, sys\nprint('try', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    program = watched.script(text + "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '2')\n")
    ended = watched.run(program, 2, "--max-restarts", "3")
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == [f"[{rank}] try {number}" for rank in (0, 1) for number in (0, 1, 2)]
    assert [line for line in ended.err.splitlines() if line.startswith("instep: restart")] == [
        "instep: restart 1 of 3",
        "instep: restart 2 of 3",
    ]


def test_why_an_attempt_failed_is_told_before_the_next(watched: Watched) -> None:
    text = "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError('once')\n"
    ended = watched.run(watched.script(text), 1, "--max-restarts", "1")
    assert ended.code == 0
    lines = ended.err.splitlines()
    told = next(number for number, line in enumerate(lines) if line.endswith("ended with exit code 1"))
    assert "ValueError: once" in lines[told:] and lines[-1] == "instep: restart 1 of 1"


def test_a_restart_costs_less_than_a_second(watched: Watched) -> None:
    text = (
        "import os, sys, time\nimport torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        f"open('{watched.folder}/t' + os.environ['TORCHELASTIC_RESTART_COUNT'] + os.environ['RANK'], 'w').write(str(time.time()))\n"
        "os._exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    assert watched.run(watched.script(text), 2, "--max-restarts", "1").code == 0
    times = [max(float((watched.folder / f"t{n}{rank}").read_text()) for rank in (0, 1)) for n in (0, 1)]
    assert times[1] - times[0] < 1.0 + os.getloadavg()[0] / (os.cpu_count() or 1) / 4

"""Many starts and ends with kills at any moment, many ranks: by hand, `pytest -m slow`."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from launching import Launcher

ROUNDS = int(os.environ.get("STRESS_ROUNDS", "200"))
BUSY = """
import os, subprocess, sys, time
import multiprocessing
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if "orphan" in sys.argv:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
for _ in range(20):
    time.sleep(0.05)
    dist.all_reduce(torch.ones(10))
    print("x" * 100)
dist.barrier()
os._exit(0)
"""


def list_files() -> set[str]:
    """What runs could leave behind in shared memory and among temporary files."""
    return {f"{folder}/{name}" for folder in ("/dev/shm",) for name in os.listdir(folder)}


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_starts_and_ends_with_random_kills_leave_nothing(launch: Launcher) -> None:
    drawn = random.Random(0)
    script = launch.script(BUSY)
    temporary = launch.folder / "tmp"
    temporary.mkdir()
    before = list_files()
    ends: dict[int, int] = {}
    for number in range(ROUNDS):
        words = ["-n", str(drawn.choice((1, 2, 3)))] + (["--no-fork"] if drawn.random() < 0.1 else [])
        if drawn.random() < 0.2:
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        process = launch.begin(*words, script, *(["orphan"] if drawn.random() < 0.5 else []), TMPDIR=str(temporary))
        if drawn.random() < 0.8:
            time.sleep(drawn.random() * 5)
            living = launch.processes()
            victim = process.pid if drawn.random() < 0.3 or not living else drawn.choice(living)
            polite = (signal.SIGTERM, signal.SIGINT) if victim == process.pid else (signal.SIGTERM,)
            number_sent = drawn.choice((signal.SIGKILL, signal.SIGKILL, *polite))
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number_sent)
        ended = launch.finish(process, 120)
        ends[ended.code] = ends.get(ended.code, 0) + 1
        print(f"round {number + 1}, exit codes and how often: {ends}", flush=True)
        assert launch.await_gone(15.0) == [], f"round {number}"
        assert not re.search(r'File ".*/instep/(launch|cli)/', ended.err), ended.err
    new = {name for name in list_files() - before if not Path(name).name.startswith("pym")}
    assert not {name for name in new if name_is_ours(name)}, new


def name_is_ours(name: str) -> bool:
    """Other work on the machine has files there too; ours are named after processes that are gone."""
    parts = Path(name).name.split("_")
    return parts[0] == "torch" and len(parts) > 1 and parts[1].isdecimal() and not Path(f"/proc/{parts[1]}").exists()


@pytest.mark.slow
def test_thirty_two_ranks_start_and_end(launch: Launcher) -> None:
    script = launch.script(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\n"
        "print(int(x))\ndist.barrier()\ndist.destroy_process_group()\n"
    )
    ended = launch.run("-n", "32", script, seconds=280)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == sorted(f"[{rank:>2}] 32" for rank in range(32))
    assert launch.await_gone(5.0) == []

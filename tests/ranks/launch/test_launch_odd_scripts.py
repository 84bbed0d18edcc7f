"""Scripts that fork, start threads and interpreters, and write what is no text: the launcher bears all of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.launch.linux import list_children
from launching import Launcher

ODD = """
import importlib, os, sys, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["RANK"])

def train(steps):
    torch.manual_seed(rank)
    model = DDP(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

def fork(end):
    pid = os.fork()
    if pid == 0:
        end()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fail():
    raise KeyError("in a child")

codes = [fork(lambda: sys.exit(3)), fork(fail)]  # with a process group, torch itself would not let such a child end
dist.init_process_group("gloo")
train(3)
codes.append(fork(lambda: os._exit(7)))
threads = [threading.Thread(target=lambda: torch.ones(64, 64).sum()) for _ in range(60)]
[thread.start() for thread in threads]
codes.append(fork(lambda: os._exit(5)))
[thread.join() for thread in threads]
train(3)
dist.barrier()
for name in ("_interpreters", "_xxsubinterpreters"):
    try:
        interpreters = importlib.import_module(name)
    except ImportError:
        continue
    inner = interpreters.create()
    interpreters.run_string(inner, "import os; os.write(1, b'from an interpreter\\\\n')")
    interpreters.destroy(inner)
    break
os.write(1, b"\\xff\\x00\\xfe" * 100 + b"\\r\\x1b[2K no end of line")
print("codes", codes, flush=True)
dist.destroy_process_group()
"""


def test_forks_threads_interpreters_and_bytes_are_borne(launch: Launcher) -> None:
    ended = launch.run("-n", "2", launch.script(ODD))
    assert ended.code == 0, ended.out + ended.err
    assert ended.out.count("codes [3, 1, 7, 5]") == 2, ended.out + ended.err
    assert ended.out.count("from an interpreter") == 2
    assert ended.err.count("KeyError: 'in a child'") == 2  # printed by the child itself
    assert "raised an exception" not in ended.err  # and no failure of the rank
    assert json.loads((ended.run_dir / "findings.json").read_text()) == []
    notes = [line for path in ended.run_dir.glob("rank*/events.jsonl") for line in path.read_text().splitlines()]
    assert [line for line in notes if '"probe-failed"' in line] == []
    for rank in range(2):
        assert b"\xff\x00\xfe" * 100 in (ended.run_dir / f"rank{rank}" / "output.log").read_bytes()


WAITS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
open("ready" + os.environ["RANK"], "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
dist.barrier()
print("went on", flush=True)
"""


def test_helpers_that_are_stopped_for_a_while_do_no_harm(launch: Launcher) -> None:
    process = launch.begin("-n", "2", launch.script(WAITS))
    launch.await_file("ready", 2)
    helpers = list_children(process.pid)
    assert helpers
    for pid in helpers:
        os.kill(pid, signal.SIGSTOP)
    (launch.folder / "go").touch()
    launch.await_(lambda: process.poll() is not None, 1.5)
    assert process.poll() is None  # nobody tells it that the ranks have ended
    for pid in helpers:
        os.kill(pid, signal.SIGCONT)
    ended = launch.finish(process)
    assert ended.code == 0, ended.err
    assert ended.out.count("went on") == 2


def test_ctrl_c_ends_a_run_whose_helpers_are_stopped(launch: Launcher) -> None:
    process = launch.begin("-n", "2", launch.script(WAITS))
    launch.await_file("ready", 2)
    for pid in list_children(process.pid):
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    ended = launch.finish(process)
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB, where the user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(folder)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


CHATTY = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(25):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    print("x" * 30000, flush=True)
if dist.get_rank() == 1:
    raise ValueError("mine")
dist.barrier()
"""


@pytest.mark.slow
def test_a_disk_that_fills_while_ranks_run_costs_the_files_only(launch: Launcher, small_disk: Path) -> None:
    ended = launch.run("-n", "2", "--run-dir", str(small_disk / "run"), launch.script(CHATTY), seconds=120)
    assert ended.code == 1, ended.err
    assert ended.out.count("x" * 30000) == 50
    assert "ValueError: mine" in ended.err
    assert ended.err.count("Traceback") == 1 + ended.err.count("Connection"), ended.err[-3000:]

"""Launchers of several nodes watch each other, and make one report. The nodes are two launchers on this machine, or two
network namespaces where the user may make them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.launch.linux import list_children
from launching import Launcher

HOST = socket.gethostname()
# Rank 1 goes into another collective, by a condition on the rank.
DIFFER = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3)
for _ in range(3):
    dist.all_reduce(x)
if dist.get_rank() == 1:
    dist.barrier()
dist.all_reduce(x)
"""
# Rank 1 leaves out the average of one step, so that its later steps are averaged with those after them.
SKIPS = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    loss = model(torch.randn(4, 8)).square().mean()
    if dist.get_rank() == 1 and step == 40:
        loss = torch.tensor(0.0, requires_grad=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
print("end of the loop", flush=True)
"""
WAIT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3)
dist.all_reduce(x)
open("ready" + os.environ["RANK"], "w").close()
if dist.get_rank() == 0:
    time.sleep(600)
dist.all_reduce(x)
"""


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def words_of(node: int, port: int, address: str = "127.0.0.1") -> list[str]:
    words = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", address, "--master-port", str(port)]
    return [*words, "--run-dir", "other"] if node else words


def findings(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "findings.json").read_text())


def test_a_stall_over_two_nodes_is_one_finding_on_the_first(launch: Launcher) -> None:
    script, port = launch.script(DIFFER), find_port()
    first = launch.begin("--stall-after", "3", *words_of(0, port), script)
    second = launch.run("--stall-after", "3", *words_of(1, port), script)
    ended = launch.finish(first)
    assert (ended.code, second.code) == (124, 124), ended.err + second.err
    assert ended.err.count("[hang/some-ranks-only]") == 2, ended.err  # when it was found, and at the end
    assert f"rank 1 on {HOST} is in barrier at train.py:8" in ended.err
    assert "[hang/" not in second.err
    assert f"instep: the findings of all nodes are on node 0 ({HOST}), in {launch.folder}/run" in second.err_lines
    (found,) = findings(launch.folder / "run")
    assert (found["id"], found["certainty"], found["ranks"]) == ("hang/some-ranks-only", "certain", [1])
    assert findings(launch.folder / "other") == [found]


@pytest.mark.slow
def test_steps_that_are_averaged_with_other_steps_are_told_while_the_run_goes_on(launch: Launcher) -> None:
    script, port = launch.script(SKIPS), find_port()
    first = launch.begin("--stall-after", "3", *words_of(0, port), script)
    second = launch.run("--stall-after", "3", *words_of(1, port), script, seconds=150)
    ended = launch.finish(first)
    assert "[numbers/silent-pairing]" not in second.err
    assert ended.err.count("certain: in step 40 rank 1 left out the average of the gradients") == 2, ended.err
    pairing = json.loads((launch.folder / "run" / "pairing.json").read_text())
    assert 40 <= pairing["step"] < 200  # at the end of the loop rank 0 waits for ever
    assert findings(launch.folder / "run")[0]["where"]["source"] == "loss = torch.tensor(0.0, requires_grad=True)"


def test_a_launcher_that_is_killed_ends_the_run_on_the_other_node(launch: Launcher) -> None:
    script, port = launch.script(WAIT), find_port()
    first = launch.begin(*words_of(0, port), script)
    second = launch.begin(*words_of(1, port), script)
    launch.await_file("ready", 2)
    launch.await_(lambda: '"node": 1' in (launch.folder / "run/nodes.json").read_text(), 10)
    second.kill()
    start = time.monotonic()
    ended = launch.finish(first)
    second.communicate()
    assert time.monotonic() - start < 15
    assert ended.code == 69, ended.err
    (found,) = findings(launch.folder / "run")
    assert (found["id"], found["certainty"], found["ranks"]) == ("hang/node-lost", "certain", [1])
    assert f"certain: node 1 ({HOST}, rank 1) is lost: its launcher has died  [hang/node-lost]" in ended.err


@pytest.mark.slow
def test_a_silent_node_is_told_while_the_run_goes_on_and_may_come_back(launch: Launcher) -> None:
    script, port = launch.script(WAIT.replace("600", "25")), find_port()
    first = launch.begin(*words_of(0, port), script)
    second = launch.begin(*words_of(1, port), script)
    launch.await_file("ready", 2)
    family = [second.pid, *descendants(second.pid)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)  # as a machine that has lost its link: silent, its connections open
    time.sleep(15)
    told = findings(launch.folder / "run")
    for pid in family:
        os.kill(pid, signal.SIGCONT)
    ended, other = launch.finish(first), launch.finish(second)
    assert [(one["id"], one["certainty"], one["ranks"]) for one in told] == [("hang/node-lost", "likely", [1])]
    assert (ended.code, other.code) == (0, 0), ended.err + other.err
    assert f"instep: node 1 ({HOST}) is heard again" in ended.err_lines
    assert findings(launch.folder / "run") == []


def descendants(pid: int) -> list[int]:
    children = list_children(pid)
    return children + [each for child in children for each in descendants(child)]


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces with a link between; their names."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip")
    names = ["instepA", "instepB"]
    lines = ["link add ivA type veth peer name ivB"]
    for name in names:
        lines.insert(0, f"netns add {name}")
    for side, number in (("A", 1), ("B", 2)):
        lines += [f"link set iv{side} netns instep{side}", f"-n instep{side} addr add 10.78.0.{number}/24 dev iv{side}"]
        lines += [f"-n instep{side} link set {device} up" for device in ("lo", f"iv{side}")]
    try:
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def begin_at(launch: Launcher, host: str, number: int, script: str, *words: str) -> subprocess.Popen[str]:
    side = host[-1]
    return subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            host,
            sys.executable,
            "-m",
            "instep",
            "run",
            "--run-dir",
            f"run{number}",
            *words,
            script,
        ],
        cwd=launch.folder,
        env=launch.environment(GLOO_SOCKET_IFNAME=f"iv{side}", OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_link_that_is_down_is_found_on_both_nodes(launch: Launcher, two_hosts: list[str]) -> None:
    script, port = launch.script(WAIT), find_port()
    nodes = []
    for number, host in enumerate(two_hosts):
        words = words_of(number, port, "10.78.0.1")[:8]
        nodes.append(begin_at(launch, host, number, script, *words))
    launch.await_file("ready", 2)
    subprocess.run(["ip", "-n", two_hosts[0], "link", "set", "ivA", "down"], check=True)
    down = time.time()
    found = [launch.folder / f"run{number}" / "findings.json" for number in (0, 1)]
    launch.await_(lambda: all(path.is_file() for path in found), 20)
    assert all(path.stat().st_mtime - down < 15 for path in found)
    for path, interface in zip(found, ("ivA", "ivB")):
        (one,) = json.loads(path.read_text())
        assert (one["id"], one["certainty"]) == ("hang/node-lost", "certain")
        assert f"{interface}, over which the nodes speak, is down" in one["cause"]
    for process in nodes:
        ended = launch.finish(process, 60)
        assert ended.code == 69, ended.err

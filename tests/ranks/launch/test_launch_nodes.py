"""Several nodes, and every option of torchrun against torchrun itself. The nodes are on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from instep.launch.linux import list_children
from launching import Launcher

# Written without torch, so that it costs little; what differs by nature is left out.
TELL = """
import json, os, sys
differs = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "INSTEP_RUN_DIR", "INSTEP_TEST_MARK", "OUT", "_")
seen = {name: value for name, value in os.environ.items() if name not in differs}
fixed = os.environ["TORCHELASTIC_RUN_ID"] if len(os.environ["TORCHELASTIC_RUN_ID"]) < 30 else "random"
port = os.environ["MASTER_PORT"] if os.environ.get("PORT_IS_GIVEN") else "free"
facts = {"argv": sys.argv[1:], "env": seen, "id": fixed, "port": port}
name = os.environ["OUT"] + os.environ["RANK"] + "." + os.environ["TORCHELASTIC_RESTART_COUNT"]
json.dump(facts, open(name, "w"))
sys.exit(int("fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
"""
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "plain": (["--nproc-per-node", "2", "tell.py", "a", "--b", "-n"], {}),
    "one": (["tell.py"], {}),
    "cpu": (["--nproc-per-node", "cpu", "tell.py"], {}),
    "auto": (["--nproc_per_node=auto", "tell.py"], {}),
    "standalone": (["--standalone", "--nproc-per-node", "2", "tell.py"], {}),
    "c10d": (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "x1", "tell.py"], {}),
    "elastic": (["--nnodes", "1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=x2",
                 "--rdzv-conf", "last_call_timeout=1,join_timeout=20", "tell.py"], {}),
    "static": (["--nnodes=1", "--master-addr", "localhost", "--master-port", "{port}", "--rdzv-id", "x3",
                "--nproc-per-node", "2", "tell.py"], {"PORT_IS_GIVEN": "1"}),
    "role": (["--role", "trainer", "--nproc-per-node", "2", "tell.py"], {}),
    "module": (["-m", "tell", "a"], {}),
    "run-path": (["--run-path", "{folder}/tell.py", "a"], {}),
    "no-python": (["--no-python", "{python}", "tell.py", "a"], {}),
    "restarts": (["--max-restarts", "1", "--monitor-interval", "0.2", "--nproc-per-node", "2", "tell.py", "fail"], {}),
    "fails": (["--nproc-per-node", "2", "tell.py", "fail"], {}),
    "virtual": (["--virtual-local-rank", "--nproc-per-node", "2", "tell.py"], {"CUDA_VISIBLE_DEVICES": "3,5"}),
    "threads": (["--nproc-per-node", "2", "tell.py"], {"OMP_NUM_THREADS": "7"}),
    "variables": (["tell.py"], {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r", "PET_MAX_RESTARTS": "2"}),
    "signals": (["--signals-to-handle", "SIGTERM,SIGUSR1", "--shutdown-timeout", "9", "tell.py"], {}),
    "logs": (["--log-dir", "logs", "-r", "3", "-t", "0:1", "--local-ranks-filter", "0", "--nproc-per-node", "2", "tell.py"], {}),
    "events": (["--event-log-handler", "null", "--start-method", "fork", "tell.py"], {}),
    "local-addr": (["--local-addr", "127.0.0.1", "tell.py"], {}),
}  # fmt: skip


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read_facts(launch: Launcher, prefix: str) -> dict[str, Any]:
    return {path.name[len(prefix) :]: json.loads(path.read_text()) for path in sorted(launch.folder.glob(f"{prefix}*"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_option_means_what_it_means_to_torchrun(launch: Launcher, name: str) -> None:
    words, variables = CASES[name]
    launch.script(TELL, "tell.py")
    variables = {"PYTHONPATH": str(launch.folder)} | variables
    if name != "threads":
        variables["OMP_NUM_THREADS"] = "1"

    port = find_port()

    def filled() -> list[str]:
        return [word.format(port=port, folder=launch.folder, python=sys.executable) for word in words]

    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *filled()],
        cwd=launch.folder,
        env=launch.environment(OUT="theirs.", **variables),
        capture_output=True,
        text=True,
        timeout=90,
    )
    ours = launch.run("--no-watch", *filled(), seconds=90, OUT="ours.", **variables)
    assert (ours.code == 0) == (theirs.returncode == 0), ours.err + theirs.stderr
    told = read_facts(launch, "theirs.")
    assert read_facts(launch, "ours.") == told
    assert told


def test_two_nodes_meet(launch: Launcher) -> None:
    script = launch.script(
        "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nx = torch.ones(1)\n"
        "dist.all_reduce(x)\nprint(int(x), os.environ['GROUP_RANK'], os.environ['LOCAL_RANK'])\n"
    )
    words = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(find_port())]
    first = launch.begin("-n", "1", *words, "--node-rank", "0", script)
    second = launch.run("-n", "2", *words, "--node-rank", "1", "--run-dir", "other", script)
    assert sorted(second.out.splitlines()) == ["[1] 3 1 0", "[2] 3 1 1"], second.err
    ended = launch.finish(first)
    assert (ended.code, ended.out) == (0, "[0] 3 0 0\n"), ended.err


def test_another_node_is_told_which_rank_failed_first(launch: Launcher) -> None:
    script = launch.script(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "if dist.get_rank() == 0:\n    raise ValueError('bad')\ndist.barrier()\n"
    )
    words = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(find_port())]
    first = launch.begin(*words, "--node-rank", "0", script)
    second = launch.run(*words, "--node-rank", "1", "--run-dir", "other", script)
    assert (launch.finish(first).code, second.code) == (1, 1)
    expected = f"the first to fail was rank 0 on {socket.gethostname()}: ValueError: bad, at {launch.folder}/train.py:5"
    assert f"instep: {expected}" in second.err_lines, second.err


@pytest.mark.slow
def test_a_node_that_joins_later_is_taken_in(launch: Launcher) -> None:
    script = launch.script(
        "import os, time, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "size = dist.get_world_size()\nprint('met', size)\nopen(f'ready{size}' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(600 if size == 1 else 1)\n"
    )
    words = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{find_port()}"]
    words += ["--rdzv-conf", "last_call_timeout=2"]
    first = launch.begin(*words, script)
    launch.await_file("ready1", 1)
    second = launch.run(*words, "--run-dir", "other", script, seconds=120)
    ended = launch.finish(first, 120)
    assert (ended.code, second.code) == (0, 0), ended.err + second.err
    assert ("met 1" in ended.out, "met 2" in ended.out, "met 2" in second.out) == (True, True, True)


@pytest.mark.slow
def test_a_node_that_is_lost_is_noticed(launch: Launcher) -> None:
    script = launch.script("import os, time\nopen('ready' + os.environ['RANK'], 'w').close()\ntime.sleep(600)\n")
    words = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(find_port())]
    first = launch.begin(*words, "--node-rank", "0", script)
    second = launch.begin(*words, "--node-rank", "1", "--run-dir", "other", script)
    launch.await_file("ready", 2)
    family = [second.pid, *descendants(second.pid)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)  # as a machine that has lost its link: silent, its connections open
    ended = launch.finish(first, 120)
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    second.communicate()
    assert ended.code == 69
    host = socket.gethostname()
    assert re.search(rf"instep: node 1 \({host}\) has not been heard of for \d+ s\n", ended.err), ended.err
    assert re.search(
        rf"likely: node 1 \({host}, rank 1\) has not been heard of for \d+ s  \[hang/node-lost\]", ended.err
    )


def descendants(pid: int) -> list[int]:
    children = list_children(pid)
    return children + [each for child in children for each in descendants(child)]


def test_both_nodes_start_again_after_a_failure(launch: Launcher) -> None:
    script = launch.script(
        "import os, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "print('met', dist.get_world_size())\n"
        "if dist.get_rank() == 1 and not os.path.exists('failed'):\n"
        "    open('failed', 'w').close()\n    raise ValueError('once')\ndist.barrier()\n"
    )
    words = [
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{find_port()}",
        "--max-restarts",
        "2",
    ]
    first = launch.begin(*words, script)
    second = launch.run(*words, "--run-dir", "other", script)
    ended = launch.finish(first)
    assert (ended.code, second.code) == (0, 0), ended.err + second.err
    # torch counts a restart on the node that failed only; both start anew.
    assert (ended.out.count("met 2"), second.out.count("met 2")) == (2, 2)


def test_says_within_fifteen_seconds_that_the_first_node_cannot_be_reached(launch: Launcher) -> None:
    port = find_port()
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    process = launch.begin(*words, launch.script("print(1)"))
    assert process.stderr is not None
    start = time.monotonic()
    line = process.stderr.readline()
    assert f"the first node cannot be reached at 127.0.0.1:{port} after 15 s: Connection refused" in line
    assert time.monotonic() - start < 20 + 2 * os.getloadavg()[0]
    process.send_signal(signal.SIGINT)
    assert launch.finish(process).code == 130


def test_nodes_that_do_not_meet_end_with_their_own_code(launch: Launcher) -> None:
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(find_port())]
    ended = launch.run(*words, "--rdzv-conf", "timeout=2", launch.script("print(1)"))
    assert (ended.code, ended.out) == (69, "")
    assert "instep: the nodes did not meet" in ended.err and "Traceback" not in ended.err

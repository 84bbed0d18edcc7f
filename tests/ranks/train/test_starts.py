"""One script, started in every way that it may be, ends with the same numbers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parent / "start_script.py")


def run_command(*command: str, **variables: str) -> list[list[str]]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split("result", 1)[1].split() for line in done.stdout.splitlines() if "result" in line]


@pytest.fixture(scope="module")
def alone() -> list[list[str]]:
    return run_command(sys.executable, SCRIPT)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def check(found: list[list[str]], alone: list[list[str]]) -> None:
    assert [size for size, *_ in found] == ["2", "2"]
    for (_, *here), (_, *there) in zip(found, alone):
        assert [float(value) for value in here] == pytest.approx([float(value) for value in there], abs=1e-11)


def test_instep_run(alone: list[list[str]], tmp_path: Path) -> None:
    check(
        run_command(sys.executable, "-m", "instep", "run", "-n", "2", "--run-dir", str(tmp_path / "run"), SCRIPT), alone
    )


@pytest.mark.parametrize("argument", ["--local-rank=0", "--local_rank=0"])
def test_torchrun_with_an_argument_of_older_days(alone: list[list[str]], argument: str) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    check(run_command(*torchrun, SCRIPT, argument), alone)


def test_torch_distributed_launch(alone: list[list[str]]) -> None:
    launch = (sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node", "2")
    check(run_command(*launch, "--master-port", free_port(), SCRIPT), alone)


def test_slurm(alone: list[list[str]]) -> None:
    variables = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": free_port(),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, SCRIPT],
            env={
                **os.environ,
                **variables,
                "OMP_NUM_THREADS": "1",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    check([line.split()[1:] for line in outputs[0].splitlines() if line.startswith("result")], alone)

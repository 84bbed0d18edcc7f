"""`instep verify` as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from recorded_ranks import SCRIPTS


def verify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "instep", "verify", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def test_in_step_with_the_largest_difference_and_the_tolerance(tmp_path: Path) -> None:
    ended = verify(tmp_path, "--steps", "3", str(SCRIPTS / "healthy_by_hand.py"))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "2 processes against one process"
    assert lines[1].split() == ["step", "samples", "loss", "gradients", "parameters", "buffers", "learning", "rate"]
    assert lines[2].split()[:4] == ["1", "32", "the", "same"]
    assert "in step: over 3 steps the largest difference for its tolerance is" in ended.stdout
    assert not list(tmp_path.iterdir()), "nothing is left in the folder"


def test_another_command_line_for_one_process_and_json(tmp_path: Path) -> None:
    path = str(SCRIPTS / "healthy_sharded.py")
    ended = verify(
        tmp_path, "-n", "1,2", "--steps", "2", "--json", "--single", f"python {path} --batch-size 32",
        "--run-dir", "kept", path, "--batch-size", "16",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["verdict"] == "in step"
    assert told["notes"] == [], "the loaders are left as the command lines have them"
    assert [row["samples"] for row in told["comparisons"][0]["rows"]] == [[32, 32, 32]] * 2
    assert "x sqrt(" in told["comparisons"][0]["tolerance"]
    assert (tmp_path / "kept" / "n2" / "launch" / "output.log").is_file()


def test_an_argument_is_divided(tmp_path: Path) -> None:
    path = str(SCRIPTS / "sampler_rank.py")
    ended = verify(tmp_path, "--steps", "2", "--divide", "batch-size", path, "--batch_size=32")
    assert ended.returncode == 1
    assert f"2 processes: {path} --batch_size=16" in ended.stderr
    assert (
        "parted at step 1: samples of rank 0 and rank 1, between the ranks of 2 processes  [same-data]" in ended.stdout
    )


def test_layers_in_the_order_of_a_set(tmp_path: Path) -> None:
    ended = verify(tmp_path, "--steps", "1", str(SCRIPTS / "parameter_order.py"))
    assert ended.returncode == 1
    assert "[parameter-order]" in ended.stdout
    assert "sorted(set(names))" in ended.stdout


def test_a_script_that_fails_is_not_judged_and_says_why(tmp_path: Path) -> None:
    ended = verify(tmp_path, script(tmp_path, "raise SystemExit('no data at /nowhere')\n"))
    assert ended.returncode == 3
    assert "not judged: the run on one process failed with exit code 1" in ended.stdout
    assert "no data at /nowhere" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_a_script_that_takes_no_step_is_not_judged(tmp_path: Path) -> None:
    ended = verify(tmp_path, script(tmp_path, "print('hello')\n"))
    assert ended.returncode == 3
    assert "ended without a step of a torch.optim optimizer" in ended.stdout


def test_a_script_that_hangs_on_two_processes(tmp_path: Path) -> None:
    text = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
    if dist.get_world_size() > 1 and step == 1:
        time.sleep(600)
"""
    ended = verify(tmp_path, "--steps", "3", "--timeout", "15", script(tmp_path, text))
    assert ended.returncode in (1, 3)
    assert "had not ended after 15 s (--timeout)" in ended.stdout  # on a slow machine not even with one process

"""The examples run as they stand on one process and on two, and come to the same numbers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launching import Launcher

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 150


def run_alone(folder: Path, name: str, *words: str) -> str:
    """What `python examples/NAME words` prints."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def run_two(folder: Path, name: str, *words: str) -> str:
    """What `instep run -n 2 examples/NAME words` prints."""
    launcher = Launcher(folder)
    ended = launcher.run("-n", "2", str(EXAMPLES / name), *words, seconds=SECONDS, HF_HUB_OFFLINE="1")
    assert ended.code == 0, ended.err[-3000:]
    return ended.out


def numbers(text: str, before: str) -> list[float]:
    """Every number that follows `before` in the text; at least one."""
    found = [float(number) for number in re.findall(re.escape(before) + r" ?(-?\d+\.?\d*)", text)]
    assert found, f"no number after {before!r} in: {text[-2000:]}"
    return found


@pytest.mark.parametrize(
    ("name", "words", "before"),
    [
        ("05_gan.py", ("--epochs", "1", "--every", "1"), ("critic", "generator")),
        ("06_ppo.py", ("--steps", "2"), ("a game lasts",)),
        ("07_contrastive.py", ("--epochs", "2"), ("0: loss", "1: loss", "before: accuracy", "after: accuracy")),
    ],
)
def test_two_processes_come_to_the_numbers_of_one(tmp_path: Path, name: str, words: tuple[str, ...], before) -> None:
    alone, two = run_alone(tmp_path, name, *words), run_two(tmp_path, name, *words)
    for word in before:
        assert numbers(two, word) == pytest.approx(numbers(alone, word), rel=5e-3), word


def test_digits_reach_the_accuracy_on_one_process_and_two(tmp_path: Path) -> None:
    alone, two = (run(tmp_path, "01_digits.py", "--epochs", "6") for run in (run_alone, run_two))
    assert numbers(alone, "test accuracy")[-1] >= 0.97
    assert numbers(two, "test accuracy")[-1] >= 0.97
    # later epochs amplify the rounding of the first
    assert numbers(two, "0: loss") == pytest.approx(numbers(alone, "0: loss"), rel=5e-3)


def test_finetuning_counts_every_token_once(tmp_path: Path) -> None:
    alone, two = (run(tmp_path, "03_finetune.py", "--steps", "20", "--texts", "300") for run in (run_alone, run_two))
    assert 0 < numbers(alone, "held-out loss")[-1] < 3.8  # log(258) = 5.55 before the first step
    assert numbers(two, "held-out loss") == pytest.approx(numbers(alone, "held-out loss"), rel=1e-3)


def test_gpt_is_stopped_on_two_processes_and_goes_on_with_one(tmp_path: Path) -> None:
    quick = ("--steps", "60", "--text-kb", "150", "--width", "64", "--vocabulary", "300", "--dir")
    metrics = tmp_path / "gpt" / "metrics.jsonl"
    launcher = Launcher(tmp_path)
    process = launcher.begin("-n", "2", str(EXAMPLES / "02_gpt.py"), *quick, "gpt")
    launcher.await_(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, SECONDS)
    process.send_signal(signal.SIGTERM)
    stopped = launcher.finish(process)
    rest = run_alone(tmp_path, "02_gpt.py", *quick, "gpt")
    whole = run_alone(tmp_path, "02_gpt.py", *quick, "whole")

    assert stopped.code == 143, stopped.err[-3000:]
    assert "held-out loss" not in stopped.out  # it had not come to the end
    assert list((tmp_path / "gpt" / "checkpoints").glob("step-*/complete.json"))
    assert numbers(rest, "held-out loss") == pytest.approx(numbers(whole, "held-out loss"), rel=1e-3)
    assert numbers(rest, "held-out loss")[-1] < 5.0  # log(300) = 5.70 before the first step
    assert "class Queue:" in rest
    assert "run directory: gpt" in rest


@pytest.mark.parametrize("run", [run_alone, run_two])
def test_plain_ddp_needs_no_instep(tmp_path: Path, run) -> None:
    output = run(tmp_path, "04_plain_ddp.py", "--epochs", "2", "--dir", "plain")
    assert numbers(output, "test accuracy")[-1] > 0.5
    assert (tmp_path / "plain" / "checkpoint.pt").stat().st_size > 100_000
    assert "import instep" not in (EXAMPLES / "04_plain_ddp.py").read_text()

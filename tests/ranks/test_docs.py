"""The tutorial's scripts do what the tutorial says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial" / "first-run.md"


def read_scripts() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def run(folder: Path, *command: str, code: int = 0) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def last_loss(folder: Path) -> float:
    line = (folder / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(line)["loss"]


def test_tutorial_comes_to_the_same_loss_on_one_two_and_three_processes(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    for folder in (one, several):
        folder.mkdir()
        (folder / "train.py").write_text(read_scripts()[0])
    run(one, "train.py", "6")
    run(several, "-m", "instep", "run", "-n", "2", "train.py", "5")
    said = run(several, "-m", "instep", "run", "-n", "3", "train.py", "6")
    assert "continues after step 99" in said
    assert last_loss(several) == pytest.approx(last_loss(one), rel=1e-5)


def test_tutorial_shows_the_finding_that_its_broken_script_gives(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(read_scripts()[1])
    said = run(tmp_path, "-m", "instep", "run", "-n", "2", "--stall-after", "4", "ddp.py", code=124)
    shown = re.findall(r"^certain: .*$", TUTORIAL.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(shown) == 1
    assert shown[0] in said.splitlines()

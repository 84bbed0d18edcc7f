"""Scripts of training libraries, unchanged: silent when they are healthy, told when they are broken.

Each takes a word that breaks it in one way. They run where the library is installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "cases" / "frameworks"
NEEDS = {
    "accelerate_train": ("accelerate",),
    "accelerate_manual": ("accelerate",),
    "fabric_train": ("lightning_fabric",),
    "trainer_train": ("transformers", "accelerate"),
    "trainer_lm": ("transformers", "accelerate"),
}
pytestmark = pytest.mark.slow


def run(name: str, word: str, ranks: int, folder: Path) -> tuple[int, list[dict[str, Any]], str]:
    for module in NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-m", "instep", "run", "-n", str(ranks), "--stall-after", "8", "--on-stall", "stop"]
    done = subprocess.run(
        [*command, "--run-dir", str(folder / "run"), str(SCRIPTS / f"{name}.py"), *([word] if word else [])],
        capture_output=True, text=True, timeout=200, cwd=folder, check=False,
    )  # fmt: skip
    findings = json.loads((folder / "run" / "findings.json").read_text())
    notes = [line for path in folder.glob("run/rank*/events.jsonl") for line in path.read_text().splitlines()]
    assert [line for line in notes if '"probe-failed"' in line] == []
    return done.returncode, findings, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_healthy_script_ends_without_a_word(name: str, ranks: int, tmp_path: Path) -> None:
    code, findings, text = run(name, "", ranks, tmp_path)
    assert code == 0, text
    assert findings == [], text


BROKEN = [
    ("accelerate_train", "unprepared", "numbers/same-data", "train = DataLoader"),
    ("accelerate_train", "unwrapped", "numbers/forward-past-wrapper", "net(x)"),
    ("accelerate_train", "raise", "crash/exception", "raise ValueError"),
    ("accelerate_train", "main_only", "hang/some-ranks-only", "evaluate(accelerator, model, test)"),
    ("accelerate_train", "nan", "nonfinite/loss", "torch.log"),
    ("accelerate_manual", "no_sync_wrong", "numbers/local-gradients", "no_sync"),
    ("fabric_train", "unprepared", "numbers/same-data", "train = DataLoader"),
    ("fabric_train", "no_sync_wrong", "numbers/local-gradients", "no_backward_sync"),
    ("fabric_train", "early", "hang/loop-left-early", 'HOW == "early"'),
    ("fabric_train", "stuck", "hang/rank-stuck-outside", "time.sleep"),
    ("fabric_train", "save_main", "hang/some-ranks-only", "fabric.save"),
    ("trainer_train", "raise", "crash/exception", "raise KeyError"),
    ("trainer_train", "local_stop", "hang/loop-left-early", 'HOW == "local_stop"'),
    ("trainer_train", "barrier_main", "hang/some-ranks-only", "torch.distributed.barrier()"),
]


@pytest.mark.parametrize(("name", "word", "wanted", "line"), BROKEN)
def test_a_broken_script_is_told(name: str, word: str, wanted: str, line: str, tmp_path: Path) -> None:
    _, findings, text = run(name, word, 2, tmp_path)
    assert findings, text
    assert findings[0]["id"] == wanted, text
    assert line in findings[0]["where"]["source"]

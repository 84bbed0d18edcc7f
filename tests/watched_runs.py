"""Runs of two ranks under `instep run`, with what was found in them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    code: int
    text: str
    findings: list[dict[str, Any]]
    run_dir: Path


def run(script: Path, folder: Path, *options: str) -> Ended:
    command = [
        sys.executable,
        "-m",
        "instep",
        "run",
        "-n",
        "2",
        "--run-dir",
        str(folder / "run"),
        *options,
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=folder, check=False)
    findings = json.loads((folder / "run" / "findings.json").read_text())
    return Ended(done.returncode, done.stdout + done.stderr, findings, folder / "run")


def notes_of_failures(run_dir: Path) -> list[str]:
    lines = [line for path in run_dir.glob("rank*/events.jsonl") for line in path.read_text().splitlines()]
    return [line for line in lines if '"probe-failed"' in line]

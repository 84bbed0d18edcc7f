"""The run directory: the only place that spells the names of its files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory; nothing is created by asking for a path."""

    root: Path

    @property
    def findings(self) -> Path:
        return self.root / "findings.json"

    @property
    def launch(self) -> Path:
        return self.root / "launch.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def peer(self) -> Path:
        return self.root / "peer.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def lock(self) -> Path:
        return self.root / "in-use.lock"

    def tracker(self, name: str) -> Path:
        """Where TensorBoard, Weights & Biases or MLflow keep their files."""
        return self.root / name

    def rank(self, rank: int) -> RankDir:
        return RankDir(self.root / f"rank{rank}")

    def ranks(self) -> list[int]:
        """Ranks that left files here, in order."""
        found = [path.name.removeprefix("rank") for path in self.root.glob("rank*")]
        return sorted(int(name) for name in found if name.isdecimal())

    def checkpoint(self, step: int) -> CheckpointDir:
        return CheckpointDir(self.checkpoints / f"step-{step}")

    def name_peer(self, other: Path) -> None:
        """Notes the directory that holds the other half of this run (launcher's files or training's files)."""
        write_json(self.peer, {"peer": str(other.resolve())})


@dataclass(frozen=True)
class RankDir:
    root: Path

    @property
    def output(self) -> Path:
        return self.root / "output.log"

    @property
    def stacks(self) -> Path:
        return self.root / "stacks.txt"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"


@dataclass(frozen=True)
class CheckpointDir:
    root: Path

    @property
    def complete(self) -> Path:
        return self.root / "complete.json"

    @property
    def step(self) -> int | None:
        """The step in the directory's name, or None when it is not named as ours are."""
        number = self.root.name.removeprefix("step-")
        return int(number) if number.isdecimal() and self.root.name.startswith("step-") else None


def write_json(path: Path, value: Any) -> None:
    """Replaces the file in one rename, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)

"""The run directory: the only place that spells the names of its files."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


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
    def stall(self) -> Path:
        """What the launcher saw of the newest stall; gone when the run went on."""
        return self.root / "stall.json"

    @property
    def pairing(self) -> Path:
        """The first optimizer step at which the ranks had taken part in different numbers of collectives."""
        return self.root / "pairing.json"

    @property
    def nodes(self) -> Path:
        """The nodes of a run on several, as the launcher here knows them: hosts, ranks, who is lost."""
        return self.root / "nodes.json"

    def forget(self) -> None:
        """Removes what an earlier run in this folder left to be judged."""
        for path in (self.findings, self.stall, self.pairing, self.nodes, self.exits):
            path.unlink(missing_ok=True)

    def node_mark(self, token: str) -> Path:
        """By which launchers on several nodes see that they write to one folder."""
        return self.root / f".node-{token}"

    @property
    def exits(self) -> Path:
        """The exit code of every rank that has ended, and when, by the wall clock."""
        return self.root / "exits.json"

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
    def agent_log(self) -> Path:
        """What torch's own launcher code printed."""
        return self.root / "agent.log"

    @property
    def torch_logs(self) -> Path:
        """For --redirects and --tee when no --log-dir is given."""
        return self.root / "torch-logs"

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

    def list_checkpoints(self) -> list[CheckpointDir]:
        """Everything here that is named as a checkpoint, whole or not, by step."""
        found = [CheckpointDir(path) for path in self.checkpoints.glob("step-*")]
        return sorted((each for each in found if each.step is not None), key=lambda each: each.step or 0)

    def partial_checkpoint(self, step: int, token: str) -> CheckpointDir:
        """Where a checkpoint is written until it is whole."""
        return CheckpointDir(self.checkpoints / f".step-{step}.{token}.partial")

    def replaced_checkpoint(self, step: int, token: str) -> CheckpointDir:
        """Where a checkpoint steps aside for a new one of the same step."""
        return CheckpointDir(self.checkpoints / f".step-{step}.{token}.replaced")

    def leftovers(self, kind: Literal["partial", "replaced", "removed"]) -> list[Path]:
        return sorted(self.checkpoints.glob(f".step-*.{kind}"))

    def removed_checkpoint(self, step: int) -> CheckpointDir:
        """Where a checkpoint goes in one rename before its files are removed, so that none is ever half there."""
        return CheckpointDir(self.checkpoints / f".step-{step}.old.removed")

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

    @property
    def crash(self) -> Path:
        """Python's lines at a fatal signal, written by faulthandler; empty when there was none."""
        return self.root / "crash.txt"

    @property
    def failure(self) -> Path:
        """How the rank ended when it did not end well: exit code, exception, the user's line."""
        return self.root / "failure.json"

    @property
    def trace(self) -> Path:
        """The steps that `--profile` recorded, for Perfetto or chrome://tracing."""
        return self.root / "trace.json"

    @property
    def replay(self) -> Path:
        """The operation that made the first NaN or infinity, with its inputs; tensors, numbers and text only."""
        return self.root / "nonfinite.pt"

    @property
    def torch_error(self) -> Path:
        """The file that torch's `@record` writes (TORCHELASTIC_ERROR_FILE)."""
        return self.root / "error.json"

    @property
    def page(self) -> Path:
        """What the rank does, in memory that it shares with those who watch it."""
        return self.root / "page.bin"

    @property
    def mispaired_page(self) -> Path:
        """The page as it was when the ranks were first seen to differ in the number of their collectives."""
        return self.root / "mispaired.bin"

    def forget(self) -> None:
        """Removes what an earlier attempt, or an earlier run in this folder, left to be judged; its output stays."""
        names = ("events", "page", "mispaired_page", "snapshot", "stacks", "crash", "failure", "torch_error", "replay")
        for name in names:
            path: Path = getattr(self, name)
            path.unlink(missing_ok=True)

    @property
    def snapshot(self) -> Path:
        """Where its threads were and its newest collectives, written when a stall was suspected."""
        return self.root / "snapshot.json"


@dataclass(frozen=True)
class CheckpointDir:
    root: Path

    @property
    def complete(self) -> Path:
        return self.root / "complete.json"

    @property
    def values(self) -> Path:
        return self.root / "values.json"

    def tensors(self, rank: int, world_size: int) -> Path:
        """The file of the tensors that this rank writes."""
        return self.root / f"tensors-{rank:05d}-of-{world_size:05d}.safetensors"

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


def keep_json(path: Path, value: Any) -> None:
    """The same for a note that may be lost: a disk that is full or gone costs the note and nothing else."""
    try:
        write_json(path, value)
    except OSError:
        with contextlib.suppress(OSError):
            path.with_name(f".{path.name}.{os.getpid()}").unlink()

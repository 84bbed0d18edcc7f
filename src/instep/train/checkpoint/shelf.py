"""The checkpoints on disk: begun, made visible by one rename, and removed. Done by rank 0 alone. Needs no torch."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from instep.errors import CheckpointError
from instep.records.run_dir import CheckpointDir, RunDir
from instep.train.checkpoint.durable_file import sync_directory
from instep.train.checkpoint.manifest import Damage, Manifest, read_manifest, write_manifest
from instep.units import format_bytes

SPARE_BYTES = 1 << 20  # for the JSON files and the file system's own book-keeping


@dataclass(frozen=True)
class Shelf:
    run_dir: RunDir

    def open(self) -> None:
        """Makes the directory and clears away what killed runs left. Raises OSError. Needs the lock."""
        self.run_dir.checkpoints.mkdir(parents=True, exist_ok=True)
        for path in self.run_dir.leftovers("replaced"):
            whole = self.run_dir.checkpoint(_step_of(path))
            if not whole.root.exists():  # killed between the two renames of `publish`
                os.rename(path, whole.root)
        for kind in ("replaced", "partial", "removed"):
            for path in self.run_dir.leftovers(kind):
                shutil.rmtree(path)

    def list_complete(self) -> tuple[list[tuple[CheckpointDir, Manifest]], list[str]]:
        """Those that say that they are whole, newest first, and what is wrong with the others."""
        found: list[tuple[CheckpointDir, Manifest]] = []
        problems: list[str] = []
        for directory in self.run_dir.list_checkpoints():
            try:
                found.append((directory, read_manifest(directory.root)))
            except Damage as damage:
                problems.append(str(damage))
        return sorted(found, key=lambda item: -item[1].sequence), problems

    def begin(self, step: int, token: str, num_bytes: int) -> CheckpointDir:
        """An empty directory to write into. Raises CheckpointError when there is no room, OSError otherwise."""
        disk = os.statvfs(self.run_dir.checkpoints)
        free = disk.f_bavail * disk.f_frsize
        if free < num_bytes + SPARE_BYTES:
            raise CheckpointError(
                f"the checkpoint of step {step} needs {format_bytes(num_bytes + SPARE_BYTES)}, and "
                f"{self.run_dir.checkpoints} has {format_bytes(free)} free. The older checkpoints are whole. "
                "Make room there, or keep fewer."
            )
        partial = self.run_dir.partial_checkpoint(step, token)
        partial.root.mkdir()
        return partial

    def publish(self, partial: CheckpointDir, manifest: Manifest, token: str) -> CheckpointDir:
        """Writes complete.json and makes the checkpoint visible, in the place of one of the same step. Durable when
        it returns. Raises OSError."""
        write_manifest(partial.root, manifest)
        sync_directory(partial.root)
        whole = self.run_dir.checkpoint(manifest.step)
        aside = self.run_dir.replaced_checkpoint(manifest.step, token)
        if whole.root.exists():
            os.rename(whole.root, aside.root)
        os.rename(partial.root, whole.root)
        sync_directory(self.run_dir.checkpoints)
        if aside.root.exists():
            shutil.rmtree(aside.root)
        return whole

    def remove(self, directory: CheckpointDir) -> None:
        """In one rename first, so that it is never half there."""
        away = self.run_dir.removed_checkpoint(directory.step or 0)
        os.rename(directory.root, away.root)
        shutil.rmtree(away.root)

    def discard(self, partial: CheckpointDir) -> None:
        shutil.rmtree(partial.root, ignore_errors=True)  # it may lie on a disk that no longer takes writes


def _step_of(path: Path) -> int:
    return int(path.name.split(".")[1].removeprefix("step-"))

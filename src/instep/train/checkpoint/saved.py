"""A checkpoint that is open for reading. Nothing in it is ever executed: JSON and safetensors only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from instep.records.run_dir import CheckpointDir
from instep.train.checkpoint.manifest import Manifest
from instep.train.checkpoint.shards import ShardIndex, index_files
from instep.train.checkpoint.source import Described


class Saved:
    """values: what was saved beside tensors; step: the step it was saved after."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest, self.step = path, manifest, manifest.step
        self.values: dict[str, Any] = json.loads(CheckpointDir(path).values.read_bytes())
        self._index: ShardIndex = index_files(path / name for name in manifest.files if name.endswith(".safetensors"))

    @property
    def described(self) -> Mapping[str, Described]:
        return self._index.described

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fills existing tensors; a DTensor takes this rank's part only. Raises CheckpointError for a name that is
        not in the checkpoint or has another shape."""
        self._index.read(targets)

    def load_all(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Whole tensors in host memory, those whose name begins with `prefix`."""
        return self.load(name for name in self.described if name.startswith(prefix))

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Whole tensors in host memory, these alone."""
        tensors = {
            name: torch.empty(self.described[name].shape, dtype=self.described[name].dtype)
            for name in names
            if name in self.described
        }
        self.read(tensors)
        return tensors

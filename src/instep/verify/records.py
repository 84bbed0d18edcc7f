"""What the ranks of one run left behind for `instep verify`, read."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

Vector = Any  # numpy.ndarray of float64
KINDS = ("local", "reduced", "applied", "start", "param", "buffer")


@dataclass(frozen=True)
class Update:
    """One optimizer step of one rank. facts: see record/updates.py and record/state.py."""

    number: int
    facts: dict[str, Any]
    file: Path

    @cached_property
    def vectors(self) -> dict[str, dict[str, Vector]]:
        """By kind and name: `local` gradients before averaging, `reduced` after it, `applied` after clipping, ..."""
        found: dict[str, dict[str, Vector]] = {kind: {} for kind in KINDS}
        with numpy.load(self.file) as file:
            for key in file.files:
                kind, _, name = key.partition("/")
                found[kind][name] = file[key]
        return found

    def unscaled(self, kind: str) -> dict[str, Vector]:
        """Gradients without the loss scale, if there was one."""
        scale = float(self.facts["scale"])
        return {name: vector / scale for name, vector in self.vectors[kind].items()}


@dataclass(frozen=True)
class Rank:
    number: int
    updates: list[Update]
    notes: list[dict[str, Any]]

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["kind"] == kind]

    @property
    def error(self) -> str | None:
        return next((note["error"] for note in self.named("end")), None)


@dataclass(frozen=True)
class Record:
    """One run. uses_run: the script trains through instep.Run."""

    world_size: int
    ranks: list[Rank]
    uses_run: bool = False
    folder: Path = field(default_factory=Path)

    @property
    def num_steps(self) -> int:
        """Optimizer steps that every rank took."""
        return min((len(rank.updates) for rank in self.ranks), default=0)

    def step(self, number: int) -> list[Update]:
        """Every rank's part of a step; numbers begin at 1."""
        return [rank.updates[number - 1] for rank in self.ranks]

    def samples(self, number: int) -> Counter[str]:
        """Over all ranks. Ranks that share a batch, as tensor parallel ones do, count once."""
        total = self._all_samples(number)
        first = self.step(number)[0].facts
        times = math.gcd(*total.values()) if first["tensor_parallel"] or first["mesh_axes"] > 1 else 1
        return Counter({sample: count // times for sample, count in total.items()}) if times > 1 else total

    def _all_samples(self, number: int) -> Counter[str]:
        return sum((Counter(update.facts["samples"]) for update in self.step(number)), Counter())

    def loss(self, number: int) -> float | None:
        """The loss of the global batch: each rank's micro-batches added as backward adds them, averaged over ranks."""
        agreed = self.step(number)[0].facts.get("agreed_loss")
        if agreed is not None:
            return float(agreed)
        sums: list[float] = []
        calls = 0
        for update in self.step(number):
            losses = [one["loss"] for one in update.facts["backwards"]]
            if not losses or None in losses:
                return None
            sums.append(float(sum(losses)))
            calls += len(losses)
        # instep.Run gives every micro-batch factor 1 and divides at the end.
        return sum(sums) / (calls if self.uses_run else len(sums))

    @property
    def batch_sizes(self) -> list[int | None]:
        """Batch sizes of the DataLoaders that rank 0 made, as the script gave them, in order."""
        return [note["given"] for note in self.ranks[0].named("loader")]


def read_record(folder: Path, world_size: int) -> Record:
    """The ranks that left a file; a line that a killed rank did not finish is left out."""
    ranks: list[Rank] = []
    uses_run = False
    for number in range(world_size):
        path = folder / f"rank{number}.jsonl"
        if not path.is_file():
            continue
        notes = [note for line in path.read_text(encoding="utf-8").splitlines() if (note := _read_line(line))]
        updates = [
            Update(place, note, folder / f"rank{number}-{place}.npz")
            for place, note in enumerate((note for note in notes if note["kind"] == "update"), 1)
        ]
        uses_run |= any(update.facts["uses_run"] for update in updates)
        ranks.append(Rank(number, updates, [note for note in notes if note["kind"] != "update"]))
    return Record(world_size, ranks, uses_run, folder)


def _read_line(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None

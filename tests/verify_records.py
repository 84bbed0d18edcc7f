"""Records of ranks as `instep verify` reads them, made without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from instep.verify.records import Record, read_record
from instep.verify.run_one import Run

FACTS: dict[str, Any] = {
    "backwards": [{"loss": 1.0, "scale": 1.0, "divisor": None, "synced": True, "line": "train.py:9"}],
    "clips": [], "scheduled": 0, "random": None, "drops": False, "draws": False, "batch_norm": False,
    "low_precision": None, "outputs": 1, "forwards": 1, "wrapped_forwards": 1, "synced": True, "gathered": [],
    "metrics": [], "tokens": [], "optimizer": 0, "optimizer_kind": "SGD", "uses_run": False, "line": "train.py:10",
    "names": ["w"], "model_names": ["w"], "shapes": [[2, 2]], "dtypes": ["float32"], "rates": [0.1], "scale": 1.0,
    "changed": [], "gradient_bits": {"w": "a"}, "joined": True, "sharded": 0, "mesh_axes": 0, "tensor_parallel": False, "wrapped": True,
    "wrap_line": "train.py:5", "broadcast_buffers": True, "replaced": 0, "hook": None, "parameter_bits": {"w": "b"},
    "statistics": [], "sample_source": "loader", "samples": ["s0", "s1"],
}  # fmt: skip

Step = Mapping[str, Any]  # facts that differ from FACTS, and `vectors`: kind/name -> numbers


def step(vectors: Mapping[str, Sequence[float]] | None = None, **facts: Any) -> Step:
    """Gradients (1, 2, 3, 4), unless said otherwise, and parameters ten times as large."""
    usual = {
        "local/w": [1.0, 2.0, 3.0, 4.0],
        "reduced/w": [1.0, 2.0, 3.0, 4.0],
        "applied/w": [1.0, 2.0, 3.0, 4.0],
        "start/w": [10.0, 20.0, 30.0, 40.0],
        "param/w": [9.9, 19.8, 29.7, 39.6],
    }
    return {**facts, "vectors": {**usual, **(vectors or {})}}


def gradient(*numbers: float, local: Sequence[float] | None = None) -> dict[str, Sequence[float]]:
    return {"reduced/w": numbers, "applied/w": numbers, "local/w": local if local is not None else numbers}


def make_record(
    folder: Path, ranks: Sequence[Sequence[Step]], notes: Sequence[Sequence[Mapping[str, Any]]] = ()
) -> Record:
    """One list of steps per rank, and what else each rank noted."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, steps in enumerate(ranks):
        lines: list[Mapping[str, Any]] = [{"kind": "start", "after": 0}]
        for number, each in enumerate(steps, 1):
            facts = {key: value for key, value in each.items() if key != "vectors"}
            lines.append({"kind": "update", "after": number, **FACTS, **facts})
            arrays = {key: numpy.asarray(value, numpy.float64) for key, value in each["vectors"].items()}
            numpy.savez(folder / f"rank{rank}-{number}.npz", **arrays)
        lines += [{"after": 0, **note} for note in (notes[rank] if notes else ())]
        lines.append({"kind": "end", "after": len(steps), "error": None})
        (folder / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return read_record(folder, len(ranks))


def make_run(folder: Path, ranks: Sequence[Sequence[Step]], **more: Any) -> Run:
    return Run(make_record(folder, ranks, **more))

"""The arguments of instep.Run, checked at the door."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from instep.errors import UsageError
from instep.records.choice import Choice
from instep.records.parallel import Parallel, read_parallel
from instep.train.precision import DTYPES, read_precision
from instep.train.slots import check_positive, choose_micro_batch
from instep.train.techniques.recompute import read_recompute

COMPRESSIONS = ("bf16", "fp16", "powersgd")
MOST_THREADS = 4096  # per process; more than any machine has cores
MOST_SAMPLES = 2**31 - 1  # no data set needs more in one step, and positions are counted in machine words


@dataclass(frozen=True)
class Arguments:
    """As the user gave them, micro_batch filled in. chosen: what was picked for the user."""

    global_batch: int
    micro_batch: int
    parallel: Parallel
    precision: str
    exact: bool
    clip_norm: float | None
    clip_value: float | None
    compress: str | None
    recompute: int | str | None
    offload: bool
    compile: bool
    seed: int
    threads: int | None
    dir: Path | None
    checkpoint_every: int | None
    keep: int
    chosen: tuple[Choice, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint keeps and what all ranks have to agree on."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "chosen"}
        return {**values, "parallel": self.parallel.write(), "dir": None if self.dir is None else str(self.dir)}


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Raises UsageError for a value that cannot be, naming it and what is allowed."""
    given = {name: _plain(value) for name, value in given.items()}
    check_positive("global_batch", given["global_batch"])
    if given["global_batch"] > MOST_SAMPLES:
        raise UsageError(f"global_batch={given['global_batch']} has to be at most {MOST_SAMPLES}.")
    chosen: list[Choice] = []
    micro_batch = given["micro_batch"]
    if micro_batch is None:
        chosen.append(choose_micro_batch(given["global_batch"]))
        micro_batch = chosen[0].value
    check_positive("micro_batch", micro_batch)
    read_precision(given["precision"])
    for name in ("clip_norm", "clip_value"):
        _check_above_zero(name, given[name])
    for name in ("checkpoint_every", "threads"):
        if given[name] is not None:
            check_positive(name, given[name])
    if given["threads"] is not None and given["threads"] > MOST_THREADS:
        raise UsageError(
            f"threads={given['threads']} has to be at most {MOST_THREADS}; cores of this machine are a good number."
        )
    check_positive("keep", given["keep"])
    if isinstance(given["seed"], bool) or not isinstance(given["seed"], int):
        raise UsageError(f"seed={given['seed']!r} has to be a whole number.")
    for name in ("exact", "offload", "compile"):
        if not isinstance(given[name], bool):
            raise UsageError(f"{name}={given[name]!r} has to be True or False.")
    _check_dir(given["dir"])
    known = isinstance(given["compress"], str) and given["compress"] in COMPRESSIONS
    if given["compress"] is not None and not known:
        allowed = ", ".join(map(repr, COMPRESSIONS))
        raise UsageError(f"compress={given['compress']!r} is not known. Allowed: {allowed}, or None.")
    if given["exact"] and given["compress"] not in (None, "bf16"):
        raise UsageError(
            f"exact=True cannot go with compress={given['compress']!r}, whose rounding depends on which sums are sent. "
            "Allowed with it: 'bf16', or None."
        )
    if given["checkpoint_every"] is not None and given["dir"] is None:
        raise UsageError(
            f"checkpoint_every={given['checkpoint_every']} has no place to save to: give dir= as well, or leave it out."
        )
    return Arguments(
        **{
            **given,
            "micro_batch": micro_batch,
            "parallel": read_parallel(given["parallel"]),
            "recompute": read_recompute(given["recompute"]),
            "dir": None if given["dir"] is None else Path(given["dir"]),
        },
        chosen=tuple(chosen),
    )


def _plain(value: Any) -> Any:
    """numpy's whole and real numbers as Python's, which JSON and comparisons over ranks need."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return value.item() if kind in ("i", "u", "f") and getattr(value, "ndim", 1) == 0 else value


def _check_dir(value: Any) -> None:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if path is not None and not (isinstance(path, str) and path and "\0" not in path):
        raise UsageError(f"dir={value!r} has to be the path of a directory, or None, which writes nothing.")


def _check_above_zero(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise UsageError(f"{name}={value!r} has to be a number above 0, or None.")


__all__ = ["COMPRESSIONS", "DTYPES", "Arguments", "read_arguments"]

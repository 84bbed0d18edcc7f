"""A run's checkpoints: what goes in, and how a run continues from one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from instep.errors import UsageError
from instep.records.parallel import read_parallel

if TYPE_CHECKING:
    from instep.train.run import Run


def check_parallel(parallel: Any) -> None:
    read_parallel(parallel)


def open_checkpoints(run: Run) -> Any:
    return None


def close_checkpoints(run: Run, failed: bool) -> None:
    return None


def save(run: Run, metric: float | None, best: str | None) -> None:
    raise UsageError("run.save needs a place: Run(dir=...).")


def restore(run: Run, path: str | os.PathLike[str]) -> bool:
    return False


def load_weights(run: Run, path: str | os.PathLike[str], model: nn.Module | None, strict: bool) -> None:
    raise NotImplementedError


def export_weights(run: Run, path: str | os.PathLike[str], model: nn.Module | None) -> None:
    raise NotImplementedError

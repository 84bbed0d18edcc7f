"""Train PyTorch models on any number of processes, with the numbers of one.

Importing this package defines names only: torch is imported when something needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instep.errors import CheckpointError, InstepError, RanksDisagree, UsageError

if TYPE_CHECKING:
    from instep.records.parallel import Parallel
    from instep.train.run import Run

__version__ = "0.1.0.dev0"
__all__ = ["CheckpointError", "InstepError", "Parallel", "RanksDisagree", "Run", "UsageError", "__version__"]

_HOMES = {"Run": "instep.train.run", "Parallel": "instep.records.parallel"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'instep' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

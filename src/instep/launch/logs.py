"""torchrun's log options on one machine: which stream of which rank goes to a file, to both, or is not shown."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.errors import UsageError

_ONE = re.compile(r"[0123]")
_MAP = re.compile(r"(\d+:[0123],)*(\d+:[0123])")


@dataclass(frozen=True)
class LogPlan:
    """redirects, tee: 0 none, 1 stdout, 2 stderr, 3 both, by local rank; folder: of this run inside --log-dir."""

    redirects: dict[int, int]
    tee: dict[int, int]
    shown_ranks: frozenset[int] | None
    folder: str | None

    def files(self, local_rank: int, restart: int) -> dict[str, Any]:
        """The fields of RankPlace that say where output goes; makes the folders."""
        shown = self.shown_ranks is None or local_rank in self.shown_ranks
        if self.folder is None:
            return {"shown": shown}
        attempt = Path(self.folder) / f"attempt_{restart}"
        folder = attempt / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, Any] = {
            "shown": shown,
            "error_file": str(folder / "error.json"),
            "filtered_stdout": str(attempt / "filtered_stdout.log"),
            "filtered_stderr": str(attempt / "filtered_stderr.log"),
        }
        for bit, name in ((1, "stdout"), (2, "stderr")):
            path = str(folder / f"{name}.log")
            if self.tee.get(local_rank, 0) & bit:
                files[f"tee_{name}"] = path
            elif self.redirects.get(local_rank, 0) & bit:
                files[name] = path
        return files


def plan_logs(options: Mapping[str, Any], num_ranks: int, run_id: str, fallback_dir: str) -> LogPlan:
    """Raises UsageError for a value that torchrun would refuse. A folder is made only when something goes into it."""
    redirects = read_streams("--redirects", options["redirects"], num_ranks)
    tee = read_streams("--tee", options["tee"], num_ranks)
    text = options["local_ranks_filter"]
    try:
        shown = frozenset(int(part) for part in text.split(",")) if text else None
    except ValueError:
        raise UsageError(f"--local-ranks-filter has to be numbers with commas, as in 0,1, but is {text!r}.") from None
    log_dir = options["log_dir"]
    if log_dir == os.devnull or not (log_dir or any(redirects.values()) or any(tee.values())):
        return LogPlan({}, {}, shown, None)
    base = log_dir or fallback_dir
    if os.path.isfile(base):
        raise UsageError(f"--log-dir {base} is a file. Name a folder, or one that can be made.")
    os.makedirs(base, exist_ok=True)
    return LogPlan(redirects, tee, shown, tempfile.mkdtemp(prefix=f"{run_id}_", dir=base))


def read_streams(option: str, text: str, num_ranks: int) -> dict[int, int]:
    """`3`, or `0:1,1:2` by local rank. Raises UsageError for anything else."""
    if _ONE.fullmatch(text):
        return dict.fromkeys(range(num_ranks), int(text))
    if _MAP.fullmatch(text):
        return {int(rank): int(value) for rank, value in (part.split(":") for part in text.split(","))}
    raise UsageError(
        f"{option} has to be 0, 1, 2 or 3, or pairs of local rank and that, as in 0:1,1:3, but is {text!r}."
    )

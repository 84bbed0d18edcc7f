"""Where the ranks of a running run are at this moment, one line each."""

from __future__ import annotations

import time
from pathlib import Path

from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView, read_run


def is_running(root: Path) -> bool:
    """Whether a rank of the run lives and has not come to its end."""
    return any(view.is_alive and not view.reached_end for view in read_run(root).ranks)


def describe_now(run: RunView) -> str:
    return "\n".join(_describe_rank(view) for view in run.ranks)


def _describe_rank(view: RankView) -> str:
    if view.page is None:
        return f"rank {view.rank}: left no page"
    if not view.is_alive:
        code = view.exit_code
        return f"rank {view.rank}: ended after {view.num_steps} steps" + (f", exit code {code}" if code else "")
    position = view.position
    if position is None:
        return f"rank {view.rank}: starting"
    seconds = max(0.0, time.monotonic() - position.since)
    return f"rank {view.rank}: step {view.num_steps}, {position.describe()} for {seconds:.1f} s"

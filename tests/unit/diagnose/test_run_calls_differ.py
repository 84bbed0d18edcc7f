"""Ranks of one instep.Run that noticed that they had come to different calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instep.diagnose.rules.hang.run_calls_differ import check
from instep.records.finding import Evidence

SCRIPT = """
for step in run.steps(train):
    step.update()
    if step.index == 6 and run.is_main:
        print(run.mean(step.loss))
"""


def run_of(folder: Path, *lines: int, echo: int | None = None) -> Any:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    views = []
    for rank, line in enumerate(lines):
        message = "came to the end of its run, by RanksDisagree" if rank == echo else f"rank {rank} came to line {line}"
        error = {
            "type": "RanksDisagree",
            "message": message,
            "frames": [{"file": str(path), "line": line, "name": "<module>"}],
        }
        cite = lambda fact, source="events.jsonl": Evidence(fact, source)  # noqa: E731
        views.append(SimpleNamespace(rank=rank, error=error, uncaught=None, num_steps=7, cite=cite))
    return SimpleNamespace(ranks=tuple(views), by_rank=dict(enumerate(views)), world_size=len(views))


def test_the_condition_and_the_rank_that_went_in_are_named(tmp_path: Path) -> None:
    [finding] = check(run_of(tmp_path, 5, 3))
    assert finding.ranks == (0,)
    assert finding.where is not None and finding.where.source == "print(run.mean(step.loss))"
    assert finding.title == "rank 0 came to line 5"


def test_the_title_is_not_that_of_the_echo(tmp_path: Path) -> None:
    [finding] = check(run_of(tmp_path, 5, 3, echo=0))
    assert finding.title == "rank 1 came to line 3"


def test_ranks_at_the_same_line_have_no_odd_one(tmp_path: Path) -> None:
    [finding] = check(run_of(tmp_path, 3, 3))
    assert finding.ranks == () and "different arguments" in finding.cause


def test_one_that_tells_alone_is_enough_where_its_call_stands_under_a_condition_on_the_rank(tmp_path: Path) -> None:
    run = run_of(tmp_path, 5, 3)
    run.ranks[1].error = None
    [finding] = check(run)
    assert finding.ranks == (0,)
    assert finding.cause.startswith("`if step.index == 6 and run.is_main:`")

"""A batch that one rank leaves out by `continue` is traced to the condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep.diagnose.missing import explain_skipped
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event

SCRIPT = """
for x, y in loader:
    if not torch.isfinite(x).all():
        continue
    model(x).sum().backward()
"""


def rank(number: int, script: Path, **lap: Any) -> RankView:
    site = Event("site", 0.0, 0, {"id": 1, "file": str(script), "line": 2, "name": "main"})
    facts = {"loader": 1, "lap": 1, "site": 1, "batches": 8, "exhausted": True} | lap
    return RankView(number, None, (site, Event("lap", 1.0, 8, facts)))


def test_the_condition_before_the_continue_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = RunView(tmp_path, (rank(0, script, backwards=8), rank(1, script, backwards=7)))
    found = explain_skipped(run)
    assert found is not None and found[0].line == 3
    text = "Rank 1 got 8 batches and trained on 7 of them: `if not torch.isfinite(x).all():` left the rest out, on this rank only."
    assert found[1] == text


def test_batches_left_out_on_all_ranks_alike_are_no_difference(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = RunView(tmp_path, (rank(0, script, backwards=4), rank(1, script, backwards=4)))
    assert explain_skipped(run) is None

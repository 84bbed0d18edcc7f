"""Where the ways of two ranks parted: the loop that one has left comes before what it did behind it."""

from __future__ import annotations

from pathlib import Path

from instep.diagnose.branches import compare
from instep.diagnose.frames import Frame
from instep.diagnose.rank_view import Position

LEFT = """def main():
    for step in range(20):
        train(step)
        if loss.item() < 0.1:
            break
    if rank == 1:
        save()
        dist.barrier()
    dist.barrier()
"""


def position(rank: int, script: Path, line: int) -> Position:
    return Position(rank, "collective", "barrier", None, (Frame(str(script), line, "main"),), 0.0, 3, 7)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_break_is_told_though_a_condition_on_the_rank_comes_later(tmp_path: Path) -> None:
    script = write(tmp_path, "left.py", LEFT)
    for line in (8, 9):
        fork = compare(position(0, script, 3), position(1, script, line))
        assert fork is not None and (fork.kind, fork.inside, fork.outside) == ("loop-left", 0, 1)
        assert fork.where.source == "if loss.item() < 0.1:"


def test_a_condition_on_the_rank_is_told_where_both_have_left_the_loop(tmp_path: Path) -> None:
    script = write(tmp_path, "left.py", LEFT)
    fork = compare(position(0, script, 9), position(1, script, 8))
    assert fork is not None and (fork.kind, fork.inside) == ("rank-branch", 1)


def test_a_loop_without_a_way_out_was_not_left_early(tmp_path: Path) -> None:
    text = "\n".join(line for line in LEFT.splitlines() if "0.1" not in line and "break" not in line)
    script = write(tmp_path, "whole.py", text)
    fork = compare(position(0, script, 3), position(1, script, 6))
    assert fork is not None and fork.kind == "rank-branch"

"""What led a rank to its end, or out of a loop, while another still worked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.diagnose.branches import compare
from instep.diagnose.ends import deciding_exit, find_broken_off, find_way_out
from instep.diagnose.frames import Frame
from instep.diagnose.rank_view import Position
from instep.records.event import Event
from instep.records.finding import CallSite

WORKER = """
def worker(files, rank):
    data = files[rank::2]
    if not data:
        return
    for epoch in range(3):
        for batch in data:
            train(batch)
            if late():
                break
    barrier()

if __name__ == "__main__":
    sys.exit(worker([], 0))
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def frame(path: Path, text: str, name: str = "worker") -> Frame:
    lines = path.read_text().splitlines()
    return Frame(str(path), next(i for i, line in enumerate(lines, 1) if text in line), name)


def ended(steps: int, exit_at: Frame | None = None) -> Any:
    event = exit_at and {"file": exit_at.file, "line": exit_at.line, "source": "sys.exit"}
    return SimpleNamespace(rank=1, num_steps=steps, last=lambda name: event)


def test_a_rank_without_a_step_returned_before_the_loop(tmp_path: Path) -> None:
    path = write(tmp_path, WORKER)
    where, _ = find_way_out(ended(0), (frame(path, "train(batch)"),))
    assert where is not None and where.source == "if not data:"


def test_a_rank_with_steps_left_the_loop(tmp_path: Path) -> None:
    path = write(tmp_path, WORKER)
    where, ways = find_way_out(ended(5), (frame(path, "train(batch)"),))
    assert where is not None and (where.source, ways) == ("if late():", 1)


def test_the_exit_at_the_end_of_every_script_decides_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, WORKER)
    assert deciding_exit(ended(5, frame(path, "sys.exit(worker"))) is None


def test_an_exit_under_a_condition_does(tmp_path: Path) -> None:
    path = write(tmp_path, "def main():\n    if time() > limit:\n        sys.exit(0)\n")
    where = deciding_exit(ended(5, frame(path, "sys.exit(0)")))
    assert where is not None and where.line == 3


LOOPS = """
def worker(rank):
    n = 16 if rank == 0 else 14
    for epoch in range(2):
        for i in range(n):
            train(i)
    barrier()
"""


def position(rank: int, at: Frame) -> Position:
    site = CallSite(at.file, at.line, "")
    return Position(rank, "collective", "all_reduce", site, (at,), 0.0, 0, 0)


def test_of_two_loops_the_one_whose_length_depends_on_the_rank_was_left(tmp_path: Path) -> None:
    path = write(tmp_path, LOOPS)
    fork = compare(position(0, frame(path, "train(i)")), position(1, frame(path, "barrier()")))
    assert fork is not None and fork.loop is not None
    assert (fork.kind, fork.outside, fork.where.line, fork.loop.line) == ("loop-left", 1, 3, 5)


def test_a_loop_of_a_fixed_length_is_left_by_nobody(tmp_path: Path) -> None:
    path = write(tmp_path, LOOPS.replace("range(n)", "range(14)"))
    assert compare(position(0, frame(path, "train(i)")), position(1, frame(path, "barrier()"))) is None


GUARD = """
def save(self, model):
    if self.rank != 0:
        return
    gather(model)

def worker(ck, step):
    train(step)
    if step % 10 == 0:
        ck.save(model)
"""


@pytest.mark.parametrize("turned", [False, True])
def test_a_condition_on_the_rank_inside_a_call_comes_before_another_around_it(tmp_path: Path, turned: bool) -> None:
    path = write(tmp_path, GUARD)
    stack = (frame(path, "gather(model)", "save"), frame(path, "ck.save(model)"))
    site = CallSite(str(path), stack[0].line, "")
    inside = Position(0, "collective", "gather", site, stack, 0.0, 0, 0)
    outside = position(1, frame(path, "train(step)"))
    fork = compare(outside, inside) if turned else compare(inside, outside)
    assert fork is not None
    assert (fork.kind, fork.inside, fork.where.source) == ("rank-branch", 0, "if self.rank != 0:")


def rank(number: int, message: str | None, *later: str) -> Any:
    event = message and SimpleNamespace(time=5.0, step=3, facts={"message": message, "site": 1})
    marks = [SimpleNamespace(when=6.0 + i, kind="enter-collective", operation=one) for i, one in enumerate(later)]
    page = SimpleNamespace(by_wall_clock=lambda when: when)
    site = CallSite("train.py", 8, "loss.backward()")
    return SimpleNamespace(
        rank=number,
        failure=None,
        echoes=False,
        page=page,
        marks=marks,
        last=lambda name: event and Event("raised", event.time, event.step, event.facts),
        site=lambda given: site,
    )


def test_an_error_that_the_whole_script_swallows_breaks_a_rank_off() -> None:
    run: Any = SimpleNamespace(ranks=(rank(0, "Connection closed by peer", "destroy_process_group"), rank(1, None)))
    [off] = find_broken_off(run)
    assert (off.view.rank, off.frames[0].line, off.when) == (0, 8, 5.0)


def test_a_rank_that_went_on_after_it_was_not_broken_off() -> None:
    run: Any = SimpleNamespace(ranks=(rank(0, "Timed out waiting", "all_reduce"), rank(1, None)))
    assert find_broken_off(run) == []

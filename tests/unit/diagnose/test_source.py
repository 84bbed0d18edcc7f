"""Lines that belong to a fact: conditions on the rank, ways out of loops, what a value was made of."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from instep.diagnose.branches import compare, conditions_of, find_handler, rank_condition, ways_out
from instep.diagnose.frames import Frame
from instep.diagnose.missing import find_conditional_growth, find_leaf
from instep.diagnose.outside import lock_awaited, locks_held
from instep.diagnose.rank_view import Position
from instep.diagnose.slices import definitions
from instep.diagnose.source import Source, load


def source_of(tmp_path: Path, text: str) -> Source:
    path = tmp_path / "train.py"
    path.write_text(text)
    source = load(str(path))
    assert source is not None
    return source


def line_of(source: Source, text: str) -> int:
    return next(number for number, line in enumerate(source.lines, 1) if text in line)


def position(source: Source, rank: int, *lines: str) -> Position:
    frames = tuple(Frame(source.path, line_of(source, text), "main") for text in lines)
    return Position(rank, "collective", "barrier", None, frames, 0.0, 0, 0)


BRANCHES = """
def main():
    rank = dist.get_rank()
    is_main = rank == 0
    for epoch in range(3):
        train()
        if is_main:
            evaluate(model)
        if loss < 1:
            gather()
        if stop:
            break
    dist.barrier()
"""


def test_a_condition_on_the_rank_is_followed_through_variables(tmp_path: Path) -> None:
    source = source_of(tmp_path, BRANCHES)
    assert source.rank_names >= {"rank", "is_main"}
    found = rank_condition(source, line_of(source, "evaluate(model)"))
    assert isinstance(found, ast.If) and found.lineno == line_of(source, "if is_main")
    assert rank_condition(source, line_of(source, "train()")) is None


def test_behind_a_condition_on_the_rank_the_line_itself_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, BRANCHES)
    fork = compare(position(source, 0, "evaluate(model)"), position(source, 1, "dist.barrier()"))
    assert fork is not None and fork.kind == "rank-branch" and fork.inside == 0
    assert fork.where.source == "evaluate(model)"


def test_a_loop_that_one_rank_has_left_names_the_way_out(tmp_path: Path) -> None:
    source = source_of(tmp_path, BRANCHES)
    fork = compare(position(source, 0, "train()"), position(source, 1, "dist.barrier()"))
    assert fork is not None and fork.kind == "loop-left" and fork.outside == 1
    assert fork.where.source == "if stop:"


def test_a_guard_that_leaves_counts_as_a_condition(tmp_path: Path) -> None:
    text = "def f(x):\n    for y in x:\n        if bad(y):\n            continue\n        reduce(y)\n"
    source = source_of(tmp_path, text)
    found = [source.site(node).source for node, _ in conditions_of(source, 5)]
    assert found == ["if bad(y):"]


def test_ways_out_leaves_out_breaks_of_inner_loops(tmp_path: Path) -> None:
    text = "while True:\n    for x in y:\n        if a:\n            break\n    if b:\n        break\n"
    source = source_of(tmp_path, text)
    loop = source.tree.body[0]
    assert isinstance(loop, ast.While)
    assert [source.site(node).source for node in ways_out(source, loop)] == ["if b:"]


def test_a_loss_without_graph_is_followed_into_the_function_that_made_it(tmp_path: Path) -> None:
    text = (
        "def compute(p):\n    if not p:\n        return torch.zeros(1, requires_grad=True)\n    return p.mean()\n\n"
        "def main():\n    loss = compute(model(x))\n    loss.backward()\n"
    )
    source = source_of(tmp_path, text)
    found = find_leaf(source, 8)
    assert found is not None and found.line == 3


def test_an_entry_that_is_added_only_sometimes_is_found_behind_the_loop(tmp_path: Path) -> None:
    text = (
        "class Net:\n    def forward(self, x):\n        out = {'a': 1}\n        if x.any():\n            out['b'] = 2\n"
        "        return out\n\ndef log(values):\n    for v in values.values():\n        reduce(v)\n\n"
        "def main():\n    log(model(x))\n"
    )
    source = source_of(tmp_path, text)
    loop = source.loops_at(10)[0]
    assert isinstance(loop, ast.For)
    found = find_conditional_growth(source, loop.iter, source.function_at(10))
    assert found is not None and found.source == "if x.any():"


def test_a_handler_around_the_caller_is_found_unless_it_raises(tmp_path: Path) -> None:
    text = "def step():\n    go()\n\ndef main():\n    try:\n        step()\n    except ValueError:\n        {}\n"
    swallowed = find_handler(source_of(tmp_path, text.format("pass")), 2)
    assert swallowed is not None and swallowed.source == "except ValueError:"
    other = tmp_path / "other"
    other.mkdir()
    assert find_handler(source_of(other, text.format("raise")), 2) is None


def test_definitions_follow_names_and_arguments(tmp_path: Path) -> None:
    text = "def run(data):\n    use(data)\n\ndef main():\n    ids = items[rank::world]\n    run(make(ids))\n"
    source = source_of(tmp_path, text)
    call = ast.parse("data").body[0]
    found = [ast.unparse(node) for node in definitions(source, call, source.function_at(2))]
    assert "items[rank::world]" in found


def test_locks_are_known_by_their_expression(tmp_path: Path) -> None:
    text = "def a():\n    with LOCK:\n        work()\n\ndef b():\n    self.lock.acquire()\n"
    source = source_of(tmp_path, text)
    assert lock_awaited(Frame(source.path, 2, "a")) == "LOCK"
    assert locks_held(Frame(source.path, 3, "a")) == ["LOCK"]
    assert lock_awaited(Frame(source.path, 6, "b")) == "self.lock"


@pytest.mark.parametrize(("test", "depends"), [("rank == 0", True), ("rank != -1", False), ("rank is None", False)])
def test_whether_a_rank_was_given_is_no_condition_on_it(tmp_path: Path, test: str, depends: bool) -> None:
    source = source_of(tmp_path, "pass\n")
    assert source.depends_on_rank(ast.parse(test, mode="eval").body) is depends

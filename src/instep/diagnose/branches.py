"""What decides whether a rank comes to a line: conditions around it, and the ways out of a loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from instep.diagnose.frames import Frame
from instep.diagnose.rank_view import Position
from instep.diagnose.slices import find_rank_decision
from instep.diagnose.source import Loop, Source, load
from instep.records.finding import CallSite

# Values that each process has for itself: its clock, its random numbers, its files, its own data.
_LOCAL_VALUE = re.compile(
    r"\b(time|perf_counter|monotonic|random|rand|exists|isfile|item|isnan|isinf|any|all|len|uniform)\b"
)


@dataclass(frozen=True)
class Fork:
    """Where two ranks took different ways. kind: rank-branch, branch, loop-left, later; inside: the rank that went into
    the branch, or is still in the loop; where: the line to look at first."""

    kind: str
    inside: int
    outside: int
    where: CallSite
    condition: CallSite | None = None
    choices: int = 1
    loop: CallSite | None = None


def compare(one: Position, two: Position) -> Fork | None:
    """How the stacks of two ranks part."""
    pair = _parting(one.frames, two.frames)
    if pair is None:
        return _deeper(one, two) or _deeper(two, one)
    first, second = pair
    source = load(first.file)
    if source is None or first.line == second.line:
        return None
    return (
        _branch_on_rank(source, one, two, first, second)
        or _inside_call(one, two, first)
        or _inside_call(two, one, second)
        or _branch(source, one, two, first, second)
        or _left_loop(source, one, two, first, second)
    )


def _parting(one: tuple[Frame, ...], two: tuple[Frame, ...]) -> tuple[Frame, Frame] | None:
    """The outermost frames in which two stacks are in the same function at different lines."""
    for first, second in zip(reversed(one), reversed(two)):
        if (first.file, first.name) != (second.file, second.name):
            return None
        if first.line != second.line:
            return first, second
    return None


def _branch_on_rank(source: Source, one: Position, two: Position, first: Frame, second: Frame) -> Fork | None:
    """A condition on the rank that holds one of the lines and not the other; the line itself is where to look."""
    for inner, outer, line, other in ((one, two, first.line, second.line), (two, one, second.line, first.line)):
        for condition, test in conditions_of(source, line):
            others = [one_condition for one_condition, _ in conditions_of(source, other)]
            if condition in others and _same_side(source, condition, line, other):
                continue
            if source.depends_on_rank(test) and not _comes_after_a_loop(source, condition, other):
                where = source.site(line if _holds(condition, line) else condition)  # a guard is where to look itself
                return Fork("rank-branch", inner.rank, outer.rank, where, source.site(condition))
    return None


def _branch(source: Source, one: Position, two: Position, first: Frame, second: Frame) -> Fork | None:
    """Another condition that holds one of the lines and not the other."""
    for inner, outer, line, other in ((one, two, first.line, second.line), (two, one, second.line, first.line)):
        if _in_common_loop(source, line, other):
            for condition, _ in conditions_of(source, line):
                if not _holds(condition, other) and not _comes_after_a_loop(source, condition, other):
                    return Fork("branch", inner.rank, outer.rank, source.site(condition), source.site(condition))
    return None


def _comes_after_a_loop(source: Source, condition: ast.AST, other: int) -> bool:
    """Whether the other rank is still in a loop that ends before the condition: the ways parted where it was left."""
    loops = [loop for loop in source.loops_at(other) if (loop.end_lineno or loop.lineno) < condition.lineno]  # type: ignore[attr-defined]
    return any(next(ways_out(source, loop), None) is not None for loop in loops)


def _inside_call(inner: Position, outer: Position, parting: Frame) -> Fork | None:
    """One rank is still inside a call that the other has left: a condition on the rank further in sent it out."""
    return _rank_branch(inner.frames[: inner.frames.index(parting)], inner, outer)


def _deeper(inner: Position, outer: Position) -> Fork | None:
    """One rank has come back to code of the script, from a library that both are in: a condition on the rank there."""
    extra = len(inner.frames) - len(outer.frames)
    if extra <= 0 or not outer.frames or inner.frames[extra:] != outer.frames:
        return None
    return _rank_branch(inner.frames[:extra], inner, outer)


def _rank_branch(frames: tuple[Frame, ...], inner: Position, outer: Position) -> Fork | None:
    """The outermost of these frames that stands under a condition on the rank."""
    for frame in reversed(frames):
        source = load(frame.file)
        found = rank_condition(source, frame.line) if source is not None else None
        if source is not None and found is not None:
            where = source.site(frame.line if _holds(found, frame.line) else found)
            return Fork("rank-branch", inner.rank, outer.rank, where, source.site(found))
    return None


def _in_common_loop(source: Source, line: int, other: int) -> bool:
    mine, others = source.loops_at(line), source.loops_at(other)
    return (not mine and not others) or bool(mine and others and mine[0] in others) or not mine


def _holds(node: ast.AST, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)  # type: ignore[attr-defined]


def _same_side(source: Source, condition: ast.AST, line: int, other: int) -> bool:
    if not isinstance(condition, ast.If):
        return True
    start = condition.orelse[0].lineno if condition.orelse else condition.end_lineno or condition.lineno
    split = start if condition.orelse else start + 1
    return (line < split) == (other < split)


def conditions_of(source: Source, line: int) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Conditions that decide whether the line is reached, innermost first: `if` around it, or a guard that leaves."""
    for node in source.enclosing(line):
        if isinstance(node, ast.If) and not _in_test(node, line):
            yield node, node.test
        for guard in _guards_before(source, node):
            yield guard, guard.test


def _in_test(node: ast.If, line: int) -> bool:
    return bool(node.body) and line < node.body[0].lineno and line <= (node.test.end_lineno or node.test.lineno)


def _guards_before(source: Source, node: ast.AST) -> Iterator[ast.If]:
    """`if ...: return` and the like before a statement in the same block."""
    parent = source.parents.get(node)
    for block in ("body", "orelse", "finalbody"):
        rows: list[ast.AST] = getattr(parent, block, None) or []
        if node in rows:
            for row in reversed(rows[: rows.index(node)]):
                if isinstance(row, ast.If) and isinstance(row.body[-1], (ast.Return, ast.Continue, ast.Break)):
                    yield row


def _left_loop(source: Source, one: Position, two: Position, first: Frame, second: Frame) -> Fork | None:
    """One rank is still in a loop that the other has left behind."""
    for inner, outer, line, other in ((one, two, first.line, second.line), (two, one, second.line, first.line)):
        left = [loop for loop in reversed(source.loops_at(line)) if not _holds(loop, other) and other > loop.lineno]
        found = (
            _with_a_way_out(source, left, line) or _of_a_length_by_rank(source, left) or _of_any_length(source, left)
        )
        if found is not None:
            where, choices, loop = found
            condition = where if choices else None
            return Fork("loop-left", inner.rank, outer.rank, where, condition, choices, source.site(loop))
    return None


def _with_a_way_out(source: Source, loops: list[Loop], line: int) -> tuple[CallSite, int, Loop] | None:
    """The line, how many such there are, and the loop."""
    for loop in loops:
        ways = list(ways_out(source, loop))
        if ways:
            return source.site(likeliest(source, ways)), len(ways), loop
    handler = find_handler(source, line) if loops else None
    return (handler, 1, loops[0]) if handler is not None else None


def _of_a_length_by_rank(source: Source, loops: list[Loop]) -> tuple[CallSite, int, Loop] | None:
    """A loop over what differs between the ranks: what makes it differ."""
    for loop in loops:
        decision = (
            find_rank_decision(source, loop.iter, source.function_at(loop.lineno))
            if isinstance(loop, ast.For)
            else None
        )
        if decision is not None:
            return source.site(decision), 0, loop
    return None


def _of_any_length(source: Source, loops: list[Loop]) -> tuple[CallSite, int, Loop] | None:
    """A loop whose number of turns is not written down: `range(30)` has as many on every rank, so that no rank leaves early."""
    loop = next((loop for loop in loops if not _has_fixed_length(loop)), None)
    return (source.site(loop), 0, loop) if loop is not None else None


def _has_fixed_length(loop: Loop) -> bool:
    call = loop.iter if isinstance(loop, ast.For) else None
    is_range = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "range"
    return is_range and all(isinstance(one, ast.Constant) for one in call.args)  # type: ignore[union-attr]


def ways_out(source: Source, loop: Loop) -> Iterator[ast.AST]:
    """The conditions under which the loop is left before its end; a bare `break` or `return` stands for itself."""
    if isinstance(loop, ast.While) and not (isinstance(loop.test, ast.Constant) and loop.test.value):
        yield loop
    for node in ast.walk(loop):
        if isinstance(node, (ast.Break, ast.Return)) and _belongs_to(source, node, loop):
            guard = next(
                (one for one in source.ancestors(node) if isinstance(one, (ast.If, ast.Try)) or one is loop), loop
            )
            yield guard if isinstance(guard, ast.If) else node


def likeliest(source: Source, ways: list[ast.AST]) -> ast.AST:
    """Of several ways out of a loop one that looks at a value which each process has for itself, else the first."""
    return next((way for way in ways if _LOCAL_VALUE.search(_text(source, way))), ways[0])


def _belongs_to(source: Source, node: ast.AST, loop: Loop) -> bool:
    for parent in source.ancestors(node):
        if parent is loop:
            return True
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(parent, (ast.For, ast.While)) and isinstance(node, ast.Break):
            return False
    return False


def _text(source: Source, node: ast.AST) -> str:
    return ast.unparse(node.test) if isinstance(node, (ast.If, ast.While)) else source.site(node).source


def find_handler(source: Source, line: int, depth: int = 3) -> CallSite | None:
    """The `except` around a line, or around a call of the function that holds it, which does not raise again."""
    for node in source.enclosing(line):
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            for handler in node.handlers:
                if not any(isinstance(part, ast.Raise) for part in ast.walk(handler)):
                    return source.site(handler)
    name = getattr(source.function_at(line), "name", None)
    for call in ast.walk(source.tree) if name and depth else ():
        if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", None)) == name:
            found = find_handler(source, call.lineno, depth - 1)
            if found is not None:
                return found
    return None


def rank_condition(source: Source, line: int) -> ast.AST | None:
    """The nearest condition on the rank that decides whether the line is reached."""
    return next((node for node, test in conditions_of(source, line) if source.depends_on_rank(test)), None)

"""The user's source, asked with a fact in hand: what surrounds a line, what decides about it, what depends on the rank.

Nothing here finds a fault by itself. A rule that has established a fact at run time asks for the line that goes with it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from instep.records.finding import CallSite

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
Loop = ast.For | ast.While | ast.AsyncFor
_RANK_WORD = re.compile(
    r"(^|_)(local_?|global_?|node_?|proc(ess)?_?|dp_)?rank(_?id)?$|^is_(local_)?(main|master|rank0|chief|world_process_zero)"
    r"|main_process|^(is_)?master$|global_zero|^get_rank$|^(LOCAL_)?RANK$|^process_index$|^on_main"
)


@dataclass(frozen=True)
class Source:
    """One parsed file."""

    path: str
    tree: ast.Module
    lines: tuple[str, ...]

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def site(self, node: ast.AST | int) -> CallSite:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return CallSite(self.path, line, self.lines[line - 1].strip() if 0 < line <= len(self.lines) else "")

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """From the nearest outwards."""
        while (node := self.parents.get(node)) is not None:  # type: ignore[assignment]
            yield node

    def statement_at(self, line: int) -> ast.stmt | None:
        """The innermost statement whose own lines include this one."""
        best: ast.stmt | None = None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
                is_inner = best is None or (node.lineno, -(node.end_lineno or 0)) >= (
                    best.lineno,
                    -(best.end_lineno or 0),
                )
                best = node if is_inner else best
        return best

    def enclosing(self, line: int) -> list[ast.AST]:
        """Statements around a line, innermost first, up to the function that holds it and not beyond."""
        start = self.statement_at(line)
        found: list[ast.AST] = []
        if start is None:
            return found
        for node in (start, *self.ancestors(start)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                break
            found.append(node)
        return found

    def function_at(self, line: int) -> Function:
        start = self.statement_at(line)
        for node in (start, *self.ancestors(start)) if start is not None else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno < line:
                return node
        return self.tree

    def loops_at(self, line: int) -> list[Loop]:
        """Loops whose body or head includes the line, innermost first."""
        return [node for node in self.enclosing(line) if isinstance(node, (ast.For, ast.While, ast.AsyncFor))]

    def function_named(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return node
        return None

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

    @cached_property
    def rank_names(self) -> frozenset[str]:
        """Variables of this file whose value depends on the rank, found by following assignments."""
        names: set[str] = set()
        for _ in range(4):
            before = len(names)
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        names.update(_names_bound(target, node.value, names))
                elif isinstance(node, ast.AnnAssign) and node.value is not None:
                    names.update(_names_bound(node.target, node.value, names))
            if len(names) == before:
                break
        return frozenset(names)

    def depends_on_rank(self, expression: ast.AST) -> bool:
        return _mentions_rank(expression, self.rank_names) and not _asks_whether_set(expression)


@cache
def load(path: str) -> Source | None:
    """None when the file cannot be read or parsed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Source(path, ast.parse(text), tuple(text.splitlines()))
    except (OSError, ValueError, SyntaxError):
        return None


def _names_bound(target: ast.expr, value: ast.expr, known: set[str]) -> set[str]:
    if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        pairs = zip(target.elts, value.elts)
        return {name for one, part in pairs for name in _names_bound(one, part, known)}
    if not _is_rank_value(value, known):
        return set()
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _is_rank_value(value: ast.expr, known: set[str]) -> bool:
    """Whether the value is a rank or a claim about it; not anything that was computed with it."""
    if isinstance(value, (ast.Compare, ast.Name, ast.Attribute, ast.BoolOp, ast.UnaryOp)):
        return _mentions_rank(value, frozenset(known))
    if isinstance(value, ast.Subscript):
        return isinstance(value.slice, ast.Constant) and _mentions_rank(value.slice, frozenset())
    if isinstance(value, ast.Call):
        words = {getattr(value.func, "attr", ""), getattr(value.func, "id", "")}
        if words & {"int", "bool", "str"} or any(_RANK_WORD.search(word) for word in words if word):
            return _mentions_rank(value, frozenset(known))
        return bool(words & {"get", "getenv"}) and _mentions_rank(value, frozenset(known))
    if isinstance(value, ast.IfExp):
        return _is_rank_value(value.body, known) or _is_rank_value(value.orelse, known)
    return False


def _asks_whether_set(expression: ast.AST) -> bool:
    """`local_rank != -1` and `rank is None`: whether the script was launched at all, which comes out alike on all ranks."""
    return isinstance(expression, ast.Compare) and all(
        ast.unparse(one) in ("-1", "None") for one in expression.comparators
    )


def _mentions_rank(expression: ast.AST, known: frozenset[str]) -> bool:
    for node in ast.walk(expression):
        word = ""
        if isinstance(node, ast.Name):
            if node.id in known:
                return True
            word = node.id
        elif isinstance(node, ast.Attribute):
            word = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value if node.value in ("RANK", "LOCAL_RANK") else ""
        if word and _RANK_WORD.search(word):
            return True
    return False

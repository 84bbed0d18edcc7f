"""Where a script writes to parameters itself, beside its optimizer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from instep.diagnose.source import Source, load
from instep.records.finding import CallSite

_PARTS = (".weight", ".bias", ".data")
_AT_START = re.compile(r"^__init__$|^_?(reset|init)(_|$)|^build|^make|^create|broadcast", re.IGNORECASE)
_OTHERS = re.compile(r"ema|shadow|target|teacher|averag|\.grad\b|optim", re.IGNORECASE)  # copies, gradients


def find_write(made: CallSite | None) -> CallSite | None:
    """The first line that changes parameters in place after a model was wrapped at a line of the same file; None when there
    is none, or when they stand in several functions, so that it is not known which of them ran."""
    source = load(made.file) if made is not None else None
    if source is None or made is None:
        return None
    rows = [node for node in _writes(source) if _counts(source, node, made.line)]
    functions = {source.function_at(node.lineno) for node in rows}
    return source.site(min(rows, key=lambda node: node.lineno)) if len(functions) == 1 else None


def _counts(source: Source, node: ast.expr | ast.stmt, made: int) -> bool:
    function = source.function_at(node.lineno)
    if _AT_START.search(getattr(function, "name", "")) or _OTHERS.search(ast.unparse(node)):
        return False
    return function is not source.function_at(made) or node.lineno > made


def _writes(source: Source) -> Iterator[ast.expr | ast.stmt]:
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, (ast.Subscript, ast.Attribute)) and _is_parameter(one) for one in targets):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
            given = [node.func.value, *node.args[:1]]
            if any(_is_parameter(one) for one in given):
                yield node


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and name not in ("requires_grad_", "zero_grad_")


def _is_parameter(node: ast.AST) -> bool:
    """`layer.weight[rows]`, `p.data`."""
    text = ast.unparse(node).partition("[")[0]
    return text.endswith(_PARTS)

"""The line of the script behind an operation of autograd's graph, and behind a derivative that is infinite."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from instep.diagnose.slices import call_at, definitions, loss_of
from instep.diagnose.source import Source, load
from instep.records.finding import CallSite

# Names in the source for operations of the graph that are called otherwise there.
_CALLED = {
    "addmm": ("linear",),
    "convolution": ("conv1d", "conv2d", "conv3d"),
    "linalgvectornorm": ("norm", "vector_norm", "normalize"),
    "logsoftmax": ("log_softmax", "cross_entropy"),
    "nllloss": ("nll_loss", "cross_entropy"),
    "mseloss": ("mse_loss",),
    "mm": ("matmul", "mm"),
    "bmm": ("bmm", "matmul", "einsum"),
}
_OPERATORS = {"div": ast.Div, "pow": ast.Pow, "mul": ast.Mult, "mm": ast.MatMult, "bmm": ast.MatMult}
# Their derivative is infinite, or not a number, where the function itself is finite.
STEEP = (
    "sqrt",
    "norm",
    "vector_norm",
    "std",
    "acos",
    "asin",
    "arccos",
    "arcsin",
    "cdist",
    "pairwise_distance",
    "atan2",
)


def find_operation(here: CallSite | None, name: str) -> CallSite | None:
    """The operation in the user's source: along what the loss was made of first, then anywhere in the file."""
    word = name.partition("Backward")[0].lower()
    names = {_plain(name) for name in (word, *_CALLED.get(word, ()))}
    operator = _OPERATORS.get(word)
    for source, node, is_near in _near_loss(here):
        if isinstance(node, ast.Call) and _plain(_called(node)) in names:
            return source.site(node)
        if operator and is_near and isinstance(node, ast.BinOp) and _is_written(node, operator, word):
            return source.site(node)
    return None


def _is_written(node: ast.BinOp, operator: type[ast.operator], word: str) -> bool:
    """A division or product by a constant makes no infinity."""
    return isinstance(node.op, operator) and (word == "pow" or not isinstance(node.right, ast.Constant))


def find_steep(here: CallSite | None) -> CallSite | None:
    """A square root, norm or the like in what the loss was made of."""
    for source, node, _ in _near_loss(here):
        if isinstance(node, ast.Call) and _called(node).rstrip("_") in STEEP:
            return source.site(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _is_root(node.right):
            return source.site(node)
    return None


def find_rate(here: CallSite | None) -> CallSite | None:
    """Where the learning rate is given: the last call with `lr=` before the line, else the first."""
    source = load(here.file) if here else None
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)] if source else []
    given = [node for node in calls if any(word.arg == "lr" for word in node.keywords)]
    before = [node for node in given if here is not None and node.lineno < here.line]
    chosen = max(before, key=lambda node: node.lineno) if before else next(iter(given), None)
    return source.site(chosen) if source is not None and chosen is not None else None


def _near_loss(here: CallSite | None) -> Iterator[tuple[Source, ast.AST, bool]]:
    """Parts of the source, those that made the loss of a backward first (they are near)."""
    source = load(here.file) if here else None
    if source is None or here is None:
        return
    call = call_at(source, here.line, "backward")
    loss = loss_of(call)
    nodes = list(definitions(source, loss, source.function_at(here.line))) if loss is not None else []
    for node in nodes:
        for part in ast.walk(node):
            yield source, part, True
    for part in ast.walk(source.tree):
        yield source, part, False
    names = {name for node in nodes for name in _names_in(node)}
    for other in imported_files(source):
        for function in other.functions():
            if function.name in names:  # a loss of a file of its own
                yield from ((other, part, True) for part in ast.walk(function))
    for other in imported_files(source):
        yield from ((other, part, False) for part in ast.walk(other.tree))


def _names_in(node: ast.AST) -> set[str]:
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return {_called(call) for call in calls}


def imported_files(source: Source) -> list[Source]:
    """Files of the script's own that a file imports: modules beside it, or in packages beside it."""
    found: dict[str, Source] = {}
    folder = Path(source.path).parent
    for node in ast.walk(source.tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else names
        for name in names:
            path = folder.joinpath(*name.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                other = load(str(file)) if file.is_file() else None
                if other is not None:
                    found[other.path] = other
    return list(found.values())


def _plain(name: str) -> str:
    """`ctc_loss`, `CTCLoss` and the operation `CtcLoss` are one name, `log_` and `log` as well."""
    return name.replace("_", "").lower()


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_root(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, float) and 0 < value.value < 1

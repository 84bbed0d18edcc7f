"""Where a value came from: definitions behind an expression, followed through calls inside the user's files."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from instep.diagnose.source import Function, Source

_MOST_STEPS = 200


def definitions(source: Source, expression: ast.AST, function: Function) -> Iterator[ast.AST]:
    """Expressions and statements that made the value, nearest first: assignments of the names in it, what they were
    made of, what called functions return, and what callers pass for parameters."""
    queue: list[tuple[ast.AST, Function]] = [(expression, function)]
    seen: set[ast.AST] = set()
    while queue and len(seen) < _MOST_STEPS:
        node, scope = queue.pop(0)
        if node in seen:
            continue
        seen.add(node)
        yield node
        for name in _loaded_names(node):
            queue += [(value, scope) for value in assigned_to(scope, name)]
            queue += [(value, where) for value, where in _passed_for(source, scope, name)]
            if not isinstance(scope, ast.Module):
                queue += [(value, source.tree) for value in assigned_to(source.tree, name)]
        queue += [(value, where) for name in _own_attributes(node) for value, where in _kept_as(source, name)]
        queue += _called(source, node)


def find_rank_decision(source: Source, expression: ast.AST, function: Function) -> ast.AST | None:
    """What the rank decides about behind an expression: what singles out some ranks, else what shares out by the rank."""
    on_rank = [one for one in definitions(source, expression, function) if _names_rank(source, one)]
    return next((one for one in on_rank if _singles_out(source, one)), next(iter(on_rank), None))


def _names_rank(source: Source, node: ast.AST) -> bool:
    """Whether an expression depends on the rank, itself and not by way of another variable, or stands under a condition
    that does."""
    return not isinstance(node, ast.Name) and (source.depends_on_rank(node) or _under_rank_condition(source, node))


def _under_rank_condition(source: Source, node: ast.AST) -> bool:
    around = (one for one in source.ancestors(node) if isinstance(one, ast.If))
    return any(source.depends_on_rank(one.test) for one in around)


def _singles_out(source: Source, node: ast.AST) -> bool:
    """Whether it treats one rank otherwise than the rest, as `n if rank == 0 else m` does, and not all by one formula."""
    compared = (one for one in ast.walk(node) if isinstance(one, ast.Compare))
    return any(source.depends_on_rank(one) for one in compared) or _under_rank_condition(source, node)


def _loaded_names(node: ast.AST) -> list[str]:
    found = [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
    return list(dict.fromkeys(found))


def _own_attributes(node: ast.AST) -> list[str]:
    """`train_set` of `self.train_set`."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load)]
    return list(dict.fromkeys(one.attr for one in found if isinstance(one.value, ast.Name) and one.value.id == "self"))


def _kept_as(source: Source, name: str) -> list[tuple[ast.AST, Function]]:
    """What the methods of this file assign to `self.name`."""
    found: list[tuple[ast.AST, Function]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and any(_keeps(target, name) for target in node.targets):
            found.append((node.value, source.function_at(node.lineno)))
    return found


def _keeps(target: ast.AST, name: str) -> bool:
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return any(
        isinstance(one, ast.Attribute) and one.attr == name and ast.unparse(one.value) == "self" for one in parts
    )


def assigned_to(scope: Function, name: str) -> list[ast.AST]:
    """Values given to a name in a function, itself only: assignments, loops, `with ... as`, growth of a container."""
    found: list[ast.AST] = []
    for node in _own_nodes(scope):
        if isinstance(node, ast.Assign) and any(_binds(target, name) for target in node.targets):
            found.append(_part_for(node, name))
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and _binds(node.target, name) and node.value is not None:
            found.append(node.value)
        elif isinstance(node, (ast.For, ast.AsyncFor)) and _binds(node.target, name):
            found.append(node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None and _binds(node.optional_vars, name):
            found.append(node.context_expr)
    return found


def _part_for(node: ast.Assign, name: str) -> ast.AST:
    """Of `a, b = x, y` the side that belongs to the name."""
    for target in node.targets:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, (ast.Tuple, ast.List)):
            for one, value in zip(target.elts, node.value.elts):
                if _binds(one, name):
                    return value
    return node.value


def _own_nodes(scope: Function) -> Iterator[ast.AST]:
    """Nodes of a function without those of functions inside it."""
    queue: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            queue[:0] = list(ast.iter_child_nodes(node))


def _binds(target: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(target)) and not isinstance(
        target, (ast.Subscript, ast.Attribute)
    )


def _passed_for(source: Source, scope: Function, name: str) -> list[tuple[ast.AST, Function]]:
    """What the callers in this file pass for a parameter."""
    if isinstance(scope, ast.Module):
        return []
    parameters = [one.arg for one in (*scope.args.posonlyargs, *scope.args.args)]
    if name not in (*parameters, *(one.arg for one in scope.args.kwonlyargs)):
        return []
    found: list[tuple[ast.AST, Function]] = []
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "id", getattr(call.func, "attr", None)) != scope.name:
            continue
        where = source.function_at(call.lineno)
        found += [(word.value, where) for word in call.keywords if word.arg == name]
        shift = 1 if isinstance(call.func, ast.Attribute) and parameters[:1] == ["self"] else 0
        position = parameters.index(name) - shift if name in parameters else -1
        if 0 <= position < len(call.args):
            found.append((call.args[position], where))
    return found


def _called(source: Source, node: ast.AST) -> list[tuple[ast.AST, Function]]:
    """What the functions of this file that an expression calls return."""
    found: list[tuple[ast.AST, Function]] = []
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", None))
        known = [function for function in source.functions() if function.name == name]
        if (
            not known
            and isinstance(call.func, ast.Name)
            and not call.func.id[:1].isupper()
            and call.func.id not in dir(builtins)
        ):
            known = [function for function in source.functions() if function.name == "forward"]  # most likely a model
        for function in known:
            found += [(one, function) for one in _own_nodes(function) if isinstance(one, (ast.Return, ast.Yield))]
    return found


def call_at(source: Source, line: int, *names: str) -> ast.Call | None:
    """The call of one of these names that stands at a line: of the innermost statement there, else of another one."""
    statement = source.statement_at(line)
    if statement is None:
        return None
    for scope in (statement, source.tree):  # several statements may share a line
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
                name = getattr(node.func, "id", getattr(node.func, "attr", None))
                if name in names:
                    return node
    return None


def loss_of(call: ast.Call | None) -> ast.AST | None:
    """`loss` of `loss.backward()`, of `accelerator.backward(loss)` and of `scaler.scale(loss).backward()`."""
    if call is None:
        return None
    if call.args:
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) else None

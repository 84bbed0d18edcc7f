"""Why a rank did not start a collective that it starts in every other step: the line that decides about it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from instep.diagnose.branches import conditions_of, find_handler, rank_condition
from instep.diagnose.data_facts import find_skipped_batches
from instep.diagnose.frames import Frame
from instep.diagnose.naming import short
from instep.diagnose.pairing import Mispairing
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import call_at, definitions, loss_of
from instep.diagnose.source import Function, Source, load
from instep.records.finding import CallSite

_GROWS = ("append", "extend", "add", "update", "setdefault", "insert")


def with_odd_rank(run: RunView, mispairing: Mispairing) -> Mispairing:
    """Where no habit tells which rank is the odd one: the one whose line stands where only some ranks come."""
    if mispairing.odd is not None or mispairing.differs:
        return mispairing
    views = [run.by_rank[slot.rank] for slot in mispairing.slots]
    there = [
        slot
        for slot, view in zip(mispairing.slots, views)
        if slot.site is not None and find_rank_condition_of_callers(view, slot.site) is not None
    ]
    if len(there) != 1:
        return mispairing
    return replace(mispairing, odd=there[0].rank, got=(there[0].operation, there[0].site))


def explain_missing(run: RunView, mispairing: Mispairing) -> tuple[CallSite | None, str]:
    """The line to look at, and a sentence that says why."""
    skipped = explain_skipped(run)
    if skipped is not None:
        return skipped
    view = run.by_rank.get(mispairing.odd if mispairing.odd is not None else -1)
    if view is None:
        return None, ""
    operation, site = mispairing.expected or ("", None)
    if site is None:
        return _explain_extra(mispairing, view)
    if mispairing.unfinished:  # what it did may as well have come in addition
        added = _explain_on_rank(mispairing, view)
        if added is not None:
            return added
    if operation == "gradients":
        found = _explain_no_gradients(view, mispairing.step, site)
        if found is not None:
            return found
    return _explain_not_reached(operation, site)


def explain_skipped(run: RunView) -> tuple[CallSite, str] | None:
    """The condition under which a loop over batches goes on to the next one, where one rank did so and no other."""
    rank, lap = find_skipped_batches(run) or (-1, None)
    loop = run.by_rank[rank].site(lap["site"]) if lap is not None else None
    source = load(loop.file) if loop is not None else None
    if lap is None or loop is None or source is None:
        return None
    guard = _guard_of_continue(source, loop.line)
    if guard is None:
        return None
    where, count = source.site(guard), f"{lap['batches']} batches and trained on {lap['backwards']} of them"
    return where, f"Rank {rank} got {count}: `{where.source}` left the rest out, on this rank only."


def _guard_of_continue(source: Source, line: int) -> ast.If | None:
    """The condition under which the loop at a line goes on to its next turn."""
    for node in ast.walk(source.tree):
        guard = source.parents.get(node)
        is_in_loop = isinstance(node, ast.Continue) and any(
            loop.lineno == line for loop in source.loops_at(node.lineno)
        )
        if is_in_loop and isinstance(guard, ast.If):
            return guard
    return None


def _explain_extra(mispairing: Mispairing, view: RankView) -> tuple[CallSite | None, str]:
    site = mispairing.got[1] if mispairing.got else None
    source = load(site.file) if site else None
    if site is None or source is None:
        return site, ""
    on_rank = _explain_on_rank(mispairing, view)
    if on_rank is not None:
        return on_rank
    condition = next((node for node, _ in conditions_of(source, site.line)), None)
    grown = _find_growth(source, site.line) if condition is None else None
    if grown is not None:
        return (
            grown,
            f"{short(site)} runs once per entry of what its loop goes over, and {short(grown)} adds one only sometimes.",
        )
    if condition is None:
        return site, f"{short(site)} was reached once more than usual."
    where = site if source.depends_on_rank(condition.test) else source.site(condition)  # type: ignore[attr-defined]
    return where, f"{short(site)} lies behind the condition at {short(source.site(condition))}."


def _explain_on_rank(mispairing: Mispairing, view: RankView) -> tuple[CallSite, str] | None:
    """The condition on the rank that led to what the rank did there: on its way to the line as its stack shows it, else
    on the ways that the source has."""
    site = mispairing.got[1] if mispairing.got else None
    if site is None:
        return None
    stack = view.main_frames
    is_there = any((frame.file, frame.line) == (site.file, site.line) for frame in stack)
    found = next((one for frame in stack if (one := explain_on_rank(frame)) is not None), None) if is_there else None
    found = found or (find_rank_condition_of_callers(view, site) if not is_there else None)
    if found is None:
        return None
    return found[0], f"{short(site)} lies behind the condition at {short(found[1])}, which depends on the rank."


def find_rank_condition_of_callers(view: RankView, site: CallSite, depth: int = 3) -> tuple[CallSite, CallSite] | None:
    """Where no stack is left: a condition on the rank around the line, or around every call of the function it is in."""
    source = load(site.file)
    if source is None:
        return None
    own = explain_on_rank(Frame(site.file, site.line, ""))
    name = getattr(source.function_at(site.line), "name", None)
    if own is not None or name is None or not depth:
        return own
    files = sorted({one.file for one in view.sites.values()} | {site.file})
    calls = [call for file in files for call in _calls_of(file, name)]
    found = [find_rank_condition_of_callers(view, call, depth - 1) for call in calls]
    return found[0] if found and all(found) else None


def _calls_of(file: str, name: str) -> Iterator[CallSite]:
    source = load(file)
    for node in ast.walk(source.tree) if source is not None else ():
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) == name:
            yield source.site(node)  # type: ignore[union-attr]


def explain_on_rank(frame: Frame) -> tuple[CallSite, CallSite] | None:
    """Where to look, and the condition on the rank that decides whether the line is reached."""
    source = load(frame.file)
    condition = rank_condition(source, frame.line) if source is not None else None
    if source is None or condition is None:
        return None
    holds = condition.lineno <= frame.line <= (condition.end_lineno or 0)  # type: ignore[attr-defined]
    return source.site(frame.line if holds else condition), source.site(condition)


def _explain_no_gradients(view: RankView, step: int, site: CallSite) -> tuple[CallSite, str] | None:
    source = load(site.file)
    if source is None:
        return None
    for event in view.named("backward-without-graph"):
        if event.step == step:
            here = view.site(event["site"]) or site
            leaf = find_leaf(source, here.line)
            at = f", made at {short(leaf)}" if leaf else ""
            return (
                leaf or here,
                f"The loss at {short(here)} had no graph{at}: its backward reaches no parameter and starts no average.",
            )
    return None


def find_leaf(source: Source, line: int) -> CallSite | None:
    """Where a loss that leads to no parameter was made: a new tensor that requires grad, or a detached one."""
    loss = loss_of(call_at(source, line, "backward"))
    if loss is None:
        return None
    for node in definitions(source, loss, source.function_at(line)):
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and _makes_leaf(part):
                return source.site(part)
    return None


def _makes_leaf(call: ast.Call) -> bool:
    if any(word.arg == "requires_grad" and getattr(word.value, "value", False) is True for word in call.keywords):
        return True
    return getattr(call.func, "attr", "") in ("requires_grad_", "detach_")


def _explain_not_reached(operation: str, site: CallSite) -> tuple[CallSite, str]:
    source = load(site.file)
    if source is None:
        return site, ""
    for node, _ in conditions_of(source, site.line):
        where = source.site(node)
        return where, f"Whether {operation} at {short(site)} is reached is decided at {short(where)}: `{where.source}`."
    handler = find_handler(source, site.line)
    if handler is not None:
        return (
            handler,
            f"An exception before {operation} at {short(site)} is caught at {short(handler)}, and the rank goes on without it.",
        )
    grown = _find_growth(source, site.line)
    if grown is not None:
        once = f"{operation} at {short(site)} runs once per entry of what the loop goes over"
        return grown, f"{once}, and {short(grown)} adds an entry only sometimes."
    return site, ""


def _find_growth(source: Source, line: int) -> CallSite | None:
    """The condition under which what a loop around the line goes over gets one more entry."""
    for loop in source.loops_at(line):
        iterated = getattr(loop, "iter", None)
        grown = find_conditional_growth(source, iterated, source.function_at(line)) if iterated is not None else None
        if grown is not None:
            return grown
    return None


def find_conditional_growth(source: Source, expression: ast.AST, function: Function) -> CallSite | None:
    """The condition under which a container gets one more entry, followed from where it is gone through."""
    for node in definitions(source, expression, function):
        scope = source.function_at(getattr(node, "lineno", 1))
        for name in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}:
            for growth in _growths(scope, name):
                guard = next((one for one in source.ancestors(growth) if isinstance(one, (ast.If, *_FUNCTIONS))), None)
                if isinstance(guard, ast.If):
                    return source.site(guard)
    return None


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)


def _growths(scope: Function, name: str) -> Iterator[ast.AST]:
    """Statements that put something into a container."""
    for node in ast.walk(scope):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Subscript) and getattr(target.value, "id", None) == name:
                    yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = getattr(node.func.value, "id", None)
            if owner == name and node.func.attr in _GROWS:
                yield node

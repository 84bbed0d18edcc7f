"""Why a rank that is in no collective does not come: what its main thread, its workers and its process are doing."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from instep.diagnose.run_view import Frame, Position, RankView, RunView
from instep.diagnose.source import Source, load
from instep.records.finding import CallSite

_LOCK_FILES = ("threading.py", "queue.py", "multiprocessing/synchronize.py")


@dataclass(frozen=True)
class Stuck:
    """kind: the rule that speaks of it; here: where the main thread is; cause_at: the line to change, if another."""

    kind: str
    position: Position
    here: CallSite | None
    cause_at: CallSite | None = None
    detail: str = ""


def explain_outside(run: RunView, position: Position) -> Stuck:
    view = run.by_rank[position.rank]
    process = run.stalled_rank(position.rank)
    here = position.frames[0].site if position.frames else position.site
    if process.get("state") == "T":
        return Stuck("stopped-process", position, here)
    if process and not process.get("answered", True):
        frames = view.worker_stacks
        own = next((frame for stack in reversed(frames) for frame in stack if frame.own), None)
        return Stuck("interpreter-lock-held", position, own.site if own else here)
    if position.kind == "data":
        lock = _lock_across_fork(view)
        if lock is not None:
            return Stuck("lock-across-fork", position, here, *lock)
        worker = _worker_frame(view)
        return Stuck("data-loader-waits", position, here, worker.site if worker else None)
    lock_line = _waits_for_lock(view)
    if lock_line is not None:
        return Stuck("lock-wait", position, here, None, lock_line)
    return Stuck("rank-stuck-outside", position, here, _polling_loop(position))


def _polling_loop(position: Position) -> CallSite | None:
    """The head of a short `while` loop around the line: what it waits for stands there."""
    frame = position.frames[0] if position.frames else None
    source = load(frame.file) if frame else None
    for loop in source.loops_at(frame.line) if source and frame else ():
        is_short = sum(isinstance(node, ast.stmt) for node in ast.walk(loop)) <= 8
        if isinstance(loop, ast.While) and is_short and not isinstance(loop.test, ast.Constant):
            return source.site(loop)  # type: ignore[union-attr]
    return None


def _worker_frame(view: RankView) -> Frame | None:
    """The innermost user's line in a worker process of a data loader."""
    for stack in view.worker_stacks:
        if any(frame.name == "_worker_loop" for frame in stack):
            own = next((frame for frame in stack if frame.own), None)
            if own is not None:
                return own
    return None


def _lock_across_fork(view: RankView) -> tuple[CallSite, str] | None:
    """A worker that waits for a lock which another thread of the rank held when the worker was forked."""
    worker = _worker_frame(view)
    if worker is None:
        return None
    lock = lock_awaited(worker)
    if lock is None:
        return None
    for name, frames in view.other_threads:
        for frame in frames:
            if frame.own and lock in locks_held(frame):
                return frame.site, f"thread {name} holds {lock}; worker waits for it at {worker.site}"
    return worker.site, f"worker waits for {lock} at {worker.site}"


def lock_awaited(frame: Frame) -> str | None:
    """The lock that a line takes: `with LOCK:` or `LOCK.acquire()`."""
    source = load(frame.file)
    statement = source.statement_at(frame.line) if source else None
    if isinstance(statement, ast.With):
        lock = statement.items[0].context_expr
        if lock.lineno <= frame.line < statement.body[0].lineno:
            return ast.unparse(statement.items[0].context_expr)
    for node in ast.walk(statement) if statement is not None and not isinstance(statement, ast.With) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "acquire":
            return ast.unparse(node.func.value)
    return None


def locks_held(frame: Frame) -> list[str]:
    """Expressions of the `with` blocks around a line."""
    source: Source | None = load(frame.file)
    if source is None:
        return []
    around = [node for node in source.enclosing(frame.line) if isinstance(node, ast.With)]
    return [
        ast.unparse(item.context_expr) for node in around for item in node.items if frame.line >= node.body[0].lineno
    ]


def _waits_for_lock(view: RankView) -> str | None:
    """The lock for which the main thread waits."""
    inner = view.innermost
    frames = view.main_frames
    if inner is None or not frames:
        return None
    if inner.file.endswith(_LOCK_FILES):
        return f"{inner.name} in {inner.file.rpartition('/')[2]}"
    return lock_awaited(frames[0]) if inner.own else None

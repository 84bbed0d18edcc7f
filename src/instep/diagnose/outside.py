"""Why a rank that is in no collective does not come: what its main thread, its workers and its process are doing."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from instep.diagnose.frames import Frame
from instep.diagnose.hang import Hang, classify
from instep.diagnose.naming import name_ranks
from instep.diagnose.rank_view import Position, RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.source import Source, load
from instep.records.finding import CallSite, Certainty

STALE_SECONDS = 2.0  # since the last beat of a rank's watching thread, which beats five times a second
# What tells most comes first, where several ranks are stuck in different ways.
_KINDS = (
    "stopped-process",
    "interpreter-lock-held",
    "lock-across-fork",
    "thread-died",
    "lock-wait",
    "data-loader-waits",
    "rank-stuck-outside",
)
_LOCK_FILES = ("threading.py", "queue.py", "multiprocessing/synchronize.py")


@dataclass(frozen=True)
class Stuck:
    """kind: the rule that speaks of it; here: where the main thread is; cause_at: the line to change, if another."""

    kind: str
    position: Position
    here: CallSite | None
    cause_at: CallSite | None = None
    detail: str = ""
    proven: bool = False


@dataclass(frozen=True)
class StuckRanks:
    """Ranks that are in no collective, stuck in the same way; the others wait for them, or nobody waits."""

    stuck: Stuck
    ranks: tuple[int, ...]
    hang: Hang

    @property
    def names(self) -> str:
        return name_ranks(self.ranks)

    @property
    def verb(self) -> str:
        """For a sentence that begins with the names."""
        return "is" if len(self.ranks) == 1 else "are"

    @property
    def certainty(self) -> Certainty:
        """Work that is long may end well, unless a timeout of the others has ended the run before."""
        return "likely" if self.hang.timed_out else "possible"

    @property
    def consequence(self) -> str:
        """The end of a sentence that names the ranks."""
        if not self.hang.waiting:
            return "and makes no progress" if len(self.ranks) == 1 else "and make no progress"
        return f"while the others wait for {'it' if len(self.ranks) == 1 else 'them'}"

    @property
    def positions(self) -> tuple[Position, ...]:
        return self.hang.outside + self.hang.waiting


def find_stuck(run: RunView, kind: str) -> StuckRanks | None:
    """The ranks of a stall that are stuck outside of collectives, when they are so in this way."""
    hang = classify(run)
    if hang is None or hang.kind != "rank-stuck-outside":
        return None
    found = [explain_outside(run, position) for position in hang.outside]
    first = min(found, key=lambda one: _KINDS.index(one.kind))
    if first.kind != kind:
        return None
    same = [one for one in found if (one.kind, one.here, one.cause_at) == (first.kind, first.here, first.cause_at)]
    return StuckRanks(first, tuple(one.position.rank for one in same), hang)


def explain_outside(run: RunView, position: Position) -> Stuck:
    view = run.by_rank[position.rank]
    process = run.stalled_rank(position.rank)
    here = position.frames[0].site if position.frames else position.site
    if process.get("state") == "T":
        return Stuck("stopped-process", position, here)
    if _does_not_answer(process):
        frames = view.worker_stacks
        own = next((frame for stack in frames for frame in stack if frame.own), None)
        return Stuck("interpreter-lock-held", position, own.site if own else here)
    if position.kind == "data":
        lock = _lock_across_fork(view, position, here)
        if lock is not None:
            return lock
        worker = _worker_frame(view)
        return Stuck("data-loader-waits", position, here, worker[0].site if worker else None)
    lock_line = _waits_for_lock(view)
    if lock_line is not None and any(event["frames"] for event in view.named("thread-raised")[-1:]):
        left = any(frame.own for _, frames in view.other_threads for frame in frames)  # that could still release it
        return Stuck("thread-died", position, here, None, lock_line, proven=not left)
    if lock_line is not None:
        return Stuck("lock-wait", position, here, None, lock_line)
    return Stuck("rank-stuck-outside", position, here, _polling_loop(position))


def _does_not_answer(process: dict[str, Any]) -> bool:
    """Whether the rank has a watching thread that neither beats nor answers."""
    if not process or process.get("answered", True) or not process.get("watched", True):
        return False
    return process.get("beat_age", STALE_SECONDS) >= STALE_SECONDS


def _polling_loop(position: Position) -> CallSite | None:
    """The head of a short `while` loop around the line: what it waits for stands there."""
    frame = position.frames[0] if position.frames else None
    source = load(frame.file) if frame else None
    for loop in source.loops_at(frame.line) if source and frame else ():
        is_short = sum(isinstance(node, ast.stmt) for node in ast.walk(loop)) <= 8
        if isinstance(loop, ast.While) and is_short and not isinstance(loop.test, ast.Constant):
            return source.site(loop)  # type: ignore[union-attr]
    return None


def _worker_frame(view: RankView) -> tuple[Frame, bool] | None:
    """The innermost user's line in a worker process of a data loader, and whether it is the innermost of all."""
    for stack in view.worker_stacks:
        names = [frame.name for frame in stack]
        inside = stack[: names.index("_worker_loop")] if "_worker_loop" in names else ()
        own = next((frame for frame in inside if frame.own), None)  # further out is where the rank was when it forked
        if own is not None:
            return own, own is stack[0]
    return None


def _lock_across_fork(view: RankView, position: Position, here: CallSite | None) -> Stuck | None:
    """A worker that waits for a lock which another thread of the rank held when the worker was forked.

    Proven when that thread is seen to hold it, and the lock is one of this process alone (taking one that processes share
    goes through Python code of multiprocessing).
    """
    worker, is_innermost = _worker_frame(view) or (None, False)
    lock = lock_awaited(worker) if worker is not None else None
    if worker is None or lock is None:
        return None
    for name, frames in view.other_threads:
        for frame in frames:
            if frame.own and lock in locks_held(frame):
                detail = f"thread {name} holds {lock}; worker waits for it at {worker.site}"
                return Stuck("lock-across-fork", position, here, frame.site, detail, proven=is_innermost)
    return Stuck("lock-across-fork", position, here, worker.site, f"worker waits for {lock} at {worker.site}")


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

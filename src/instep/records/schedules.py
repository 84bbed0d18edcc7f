"""The orders in which a pipeline may run its micro-batches, by the name that `Parallel(schedule=...)` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep.errors import UsageError


@dataclass(frozen=True)
class Schedule:
    """torch_name: of torch.distributed.pipelining; stages_per_rank: None when any number from 2 will do; fallback: the
    schedule for a number of micro-batches that this one cannot run, with the stages at the same ranks."""

    torch_name: str
    stages_per_rank: int | None = 1
    fallback: str | None = None
    splits_backward: bool = False  # weights' gradients come apart from those of activations


SCHEDULES = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B", fallback="gpipe"),
    "looped_bfs": Schedule("LoopedBFS", None),
    "interleaved_1f1b": Schedule("Interleaved1F1B", None, "looped_bfs"),
    "interleaved_zero_bubble": Schedule("InterleavedZeroBubble", None, "looped_bfs", True),
    "zbv": Schedule("ZBVZeroBubble", 2, None, True),
    "dualpipev": Schedule("DualPipeV", 2, "zbv", True),
}


def check_schedule(name: object, cut: tuple[str, ...] | None, pipeline: int | None) -> None:
    """Raises UsageError for a schedule that there is not, and for cut points that it cannot have."""
    if not isinstance(name, str) or name not in SCHEDULES:
        raise UsageError(
            f"Parallel(schedule={name!r}) is not an order to run a pipeline in. Allowed: {', '.join(map(repr, SCHEDULES))}."
        )
    if cut is None or pipeline is None:
        return
    per_rank = SCHEDULES[name].stages_per_rank
    fitting = [pipeline * n - 1 for n in ([2, 3, 4] if per_rank is None else [per_rank])]
    if len(cut) in fitting or (per_rank is None and len(cut) > pipeline and (len(cut) + 1) % pipeline == 0):
        return
    listed = " or ".join(map(str, fitting)) + (" and so on" if per_rank is None else "")
    raise UsageError(
        f"Parallel(pipeline={pipeline}, schedule={name!r}) takes {listed} cut points, one less than stages; cut={list(cut)} "
        f"has {len(cut)}."
    )


def read_cut(cut: object) -> tuple[str, ...] | None:
    """The cut points as a tuple. Raises UsageError for what are no names of modules."""
    if cut is None:
        return None
    given: list[object] = list(cut) if isinstance(cut, (list, tuple)) else [cut]  # pyright: ignore[reportUnknownArgumentType]
    names = [name for name in given if isinstance(name, str) and name]
    if not names or len(names) < len(given):
        raise UsageError(
            f"Parallel(cut={cut!r}): cut points are the names of the modules that begin a new stage, as cut=['layers.4']."
        )
    if len(set(names)) < len(names):
        raise UsageError(f"Parallel(cut={cut!r}) names a module twice; each begins one stage.")
    return tuple(names)


def stages_per_rank(schedule: str, cut: Sequence[str] | None, pipeline: int) -> int:
    """How many stages each rank of a pipeline runs."""
    if cut is not None:
        return (len(cut) + 1) // pipeline
    return SCHEDULES[schedule].stages_per_rank or 2

"""What a stall is, told apart once for all rules of the family: one stall gives one finding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from instep.diagnose.branches import Fork, compare
from instep.diagnose.data_facts import UnevenLap, find_uneven_lap
from instep.diagnose.model_facts import find_past_wrapper
from instep.diagnose.naming import short
from instep.diagnose.pairing import Mispairing, find_mispairing
from instep.diagnose.rank_view import ECHO, Position
from instep.diagnose.run_view import RunView
from instep.diagnose.stop_requests import StopRequest, find_stop_request
from instep.diagnose.threads import Threaded, find_threaded
from instep.diagnose.transfers import Transfer, find_transfers, has_partner
from instep.records.event import Event
from instep.records.finding import Evidence


@dataclass(frozen=True)
class Hang:
    """kind: the rule that speaks of it, by the last part of its id; timed_out: a rank has given up waiting."""

    kind: str
    waiting: tuple[Position, ...]
    outside: tuple[Position, ...]
    proven: bool
    timed_out: bool = False
    fork: Fork | None = None
    uneven: UnevenLap | None = None
    error: tuple[int, Event] | None = None
    mispairing: Mispairing | None = None
    transfers: tuple[Transfer, ...] = ()
    stop: StopRequest | None = None
    threads: Threaded | None = None


@cache
def classify(run: RunView) -> Hang | None:
    """The stall of this run, or None when it is not stalled."""
    if run.stall is None or not run.positions or any(view.uncaught is not None for view in run.ranks):
        return None
    seen = {*run.stall["waiting"], *run.stall["outside"]}
    is_waiting = {
        one.rank: one.waits or one.rank in run.stall["waiting"] or run.by_rank[one.rank].is_in_distributed
        for one in run.positions
    }
    waiting = tuple(one for one in run.positions if one.rank in seen and is_waiting[one.rank])
    outside = tuple(one for one in run.positions if one.rank in seen and not is_waiting[one.rank])
    base = Hang("", waiting, outside, run.stall["proven"], run.stall.get("timed_out", False))
    if all(one.operation == "destroy_process_group" for one in waiting + outside):
        return replace(base, kind="backend-does-not-end")
    if not waiting and outside and all(one.kind == "ended" for one in outside):
        return replace(base, kind="process-does-not-end")
    error = find_held_back(run, outside) or find_swallowed(run)
    if error is not None:
        return replace(base, kind="error-swallowed", error=error)
    if find_past_wrapper(run):
        return replace(base, kind="past-wrapper")
    threads = find_threaded(run) if not outside else None
    if threads is not None:
        return replace(base, kind="collectives-in-threads", threads=threads)
    mispairing = find_mispairing(run)
    if mispairing is not None and mispairing.differs == "root":
        return replace(base, kind="different-roots", mispairing=mispairing)
    if mispairing is not None and mispairing.sizes_differ:
        return replace(base, kind="different-sizes", mispairing=mispairing)
    if mispairing is not None and mispairing.is_silent:
        return replace(base, kind="silent", mispairing=mispairing)
    uneven = find_uneven_lap(run)
    if uneven is not None:
        return replace(base, kind="uneven-batches", uneven=uneven)
    transfers = find_transfers(run, waiting)
    alone = tuple(one for one in transfers if not has_partner(one, transfers))
    away = {one.peer for one in alone} - {one.rank for one in outside}
    if alone and (away or not outside):
        return replace(base, kind="transfer-without-partner", transfers=alone)
    if outside:
        return replace(base, kind="rank-stuck-outside")
    if run.stall.get("ended"):
        return replace(base, kind="rank-left-early")
    stop = find_stop_request(run)
    if stop is not None and waiting:
        fork = Fork("loop-left", stop.others[0], stop.ranks[0], stop.where, stop.where)
        return replace(base, kind="loop-left-early", fork=fork, stop=stop)
    fork = find_fork(waiting)
    if fork is not None and fork.loop is not None:
        uneven = find_uneven_lap(run, fork.loop.line)
        if uneven is not None:
            return replace(base, kind="uneven-batches", uneven=uneven)
    if fork is not None:
        kinds = {"rank-branch": "some-ranks-only", "loop-left": "loop-left-early", "branch": "different-branches"}
        return replace(base, kind=kinds.get(fork.kind, "collective-mismatch"), fork=fork, mispairing=mispairing)
    if len({(one.operation, one.sequence) for one in waiting}) == 1:
        return replace(base, kind="no-answer")
    return replace(base, kind="collective-mismatch", mispairing=mispairing)


def find_fork(positions: tuple[Position, ...]) -> Fork | None:
    """The first pair of ranks whose ways part in the user's code."""
    for index, one in enumerate(positions):
        for two in positions[index + 1 :]:
            fork = compare(one, two)
            if fork is not None:
                return fork
    return None


def ranks_with(hang: Hang, rank: int) -> tuple[int, ...]:
    """The ranks that wait where this one does."""
    place = next(((one.operation, one.site) for one in hang.waiting if one.rank == rank), None)
    return tuple(one.rank for one in hang.waiting if (one.operation, one.site) == place) or (rank,)


def find_held_back(run: RunView, outside: tuple[Position, ...]) -> tuple[int, Event] | None:
    """An exception that one rank alone handles at the moment, while it waits for the others in an `except` or a `finally`.
    Where a rank is still under way it may come: long work in an `except`, as building what could not be loaded."""
    if outside:
        return None
    held = {view.rank: error for view in run.ranks if (error := view.handling) is not None}
    for rank, error in held.items():
        alone = not any(other["type"] == error["type"] for number, other in held.items() if number != rank)
        position = run.by_rank[rank].position
        if alone and position is not None and error["frames"] and not ECHO.search(error["message"]):
            return rank, Event("held-back", position.since, position.step, error | {"call": position.describe()})
    return None


def find_swallowed(run: RunView) -> tuple[int, Event] | None:
    """An exception on one rank that passed through a watched call, after which that rank went on."""
    for view in run.ranks:
        for event in view.named("raised"):
            went_on = view.position is not None and view.position.since > event.time + 1e-3
            if went_on and view.failure is None and not _is_echo(event):
                others = [one for one in run.ranks if one.rank != view.rank]
                if not any(_same(event, other.named("raised")) for other in others):
                    return view.rank, event
    return None


def _same(event: Event, others: list[Event]) -> bool:
    return any(one["type"] == event["type"] and one["call"] == event["call"] for one in others)


def _is_echo(event: Event) -> bool:
    return bool(ECHO.search(event["message"]))


def cite_positions(run: RunView, positions: tuple[Position, ...]) -> tuple[Evidence, ...]:
    """One line per rank: where it is, and in a stall for how long."""
    rows: list[Evidence] = []
    for one in positions:
        lasting = f", for {run.seconds_since(one.since):.0f} s" if run.stall is not None else ""
        inner, outer = one.frames[:1], one.frames[-1:]
        path = f", called from {short(outer[0].site)}" if inner and outer and inner != outer else ""
        rows.append(
            Evidence(
                f"{run.name(one.rank)} is {one.describe()}{path}, step {one.step}{lasting}",
                f"rank{one.rank}/{'page.bin' if run.by_rank[one.rank].newest_snapshot is None else 'snapshot.json'}",
                one.rank,
            )
        )
    return tuple(rows)

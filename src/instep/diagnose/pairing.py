"""Which collective of one rank met which of another. Backends pair them by count within a group, not by meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records import recording as layout
from instep.records.finding import CallSite
from instep.records.recording import Mark

# Of parameters that are sharded: their sizes differ when ranks are at different layers.
_SHARDED = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
EQUAL_SIZES = ("all_reduce", "all_gather", "reduce", "broadcast", "gather", "broadcast_object_list", *_SHARDED)
_MIN_HISTORY = 3  # steps of the same shape that make a habit


Act = tuple[str, CallSite | None]  # an operation and the line it is started from


@dataclass(frozen=True)
class Slot:
    """Place number `sequence` in the default group, as one rank filled it. operation: `gradients` for what backward
    starts, `buffers` for what the wrapped model's forward does; turn: number of the forward it belongs to, counting those
    whose backward averages, or of the step where there is none; open: it has not come back."""

    rank: int
    sequence: int
    operation: str
    site: CallSite | None
    step: int
    turn: int
    open: bool
    elements: int = 0
    dtype: str = ""
    root: int | None = None
    flags: int = 0

    def describe(self) -> str:
        words = {"gradients": "gradients of backward", "buffers": "the wrapped model's forward"}
        return f"{words.get(self.operation, self.operation)} at {short(self.site)}"

    @property
    def meaning(self) -> tuple[object, ...]:
        """What has to be equal on all ranks. Two lines may meet rightly: a root often takes its own branch."""
        if self.operation == "gradients":
            return self.operation, self.turn
        if self.operation == "buffers":  # of an evaluation or of training
            return self.operation, self.flags & (layout.NO_GRAD | layout.EVALUATING)
        sizes = (self.elements, self.dtype) if self.operation in EQUAL_SIZES else ()
        return self.operation, self.root, *sizes


_STAGES = {"collective": "", "backward": "gradients", "forward": "buffers", "step": "optimizer", "data": "data"}


def slots_of(view: RankView, marks: list[Mark]) -> dict[int, Slot]:
    """Slots by sequence number, as far back as the marks go."""
    found: dict[int, Slot] = {}
    entered: Mark | None = None
    turn = entered_turn = 0
    for mark, turn in _with_turns(marks):
        stage = mark.kind.partition("-")[0]
        if stage == "enter":
            entered, entered_turn = mark, turn
        elif stage == "leave" and entered is not None:
            if not entered.flags & layout.OTHER_GROUP:
                for sequence in range(entered.sequence + 1, mark.sequence + 1):
                    found[sequence] = _slot(view, entered, sequence, entered_turn, False)
            entered = None
    if entered is not None and not entered.flags & layout.OTHER_GROUP and not entered.kind.endswith("data"):
        # Of one that has died, or that we ended, the newest reading of what is pending may be missing.
        died = view.failure is not None or bool((view.exit or {}).get("by_us"))
        if entered.kind.endswith("collective") or died or (view.page is not None and view.page.pending):
            found[entered.sequence + 1] = _slot(view, entered, entered.sequence + 1, turn, True)
    return found


def _with_turns(marks: list[Mark]) -> Iterator[tuple[Mark, int]]:
    """Each mark with the number of the forward it belongs to; before the first backward that is seen it is not known."""
    counts = any(mark.kind == "enter-backward" and mark.elements for mark in marks)
    turn = 0
    for mark in marks:
        if not counts:
            turn = mark.step
        elif mark.kind == "enter-backward":
            turn = mark.elements
        elif mark.kind == "enter-forward" and not mark.flags and turn:
            turn += 1
        yield mark, turn


def _slot(view: RankView, mark: Mark, sequence: int, turn: int, is_open: bool) -> Slot:
    what = mark.kind.partition("-")[2]
    operation = mark.operation or _STAGES.get(what, what)
    given = mark.given if what == "collective" else (mark.elements, "", None)
    return Slot(view.rank, sequence, operation, view.site(mark.site), mark.step, turn, is_open, *given, mark.flags)


@dataclass(frozen=True)
class Mispairing:
    """The first collective in which the ranks meant different things. odd: the rank that departed from its habit;
    expected: what that rank does there otherwise; got: what it did; is_silent: all ranks came through it and went on;
    differs: elements, dtype or root, where all called the same line and differ in that only; unfinished: the odd rank
    did not come to the end of that turn; since: the step from which on it may have begun, where the steps before were
    only counted."""

    slots: tuple[Slot, ...]
    step: int
    is_silent: bool
    odd: int | None = None
    differs: str = ""
    expected: Act | None = None
    got: Act | None = None
    unfinished: bool = False
    since: int | None = None

    @property
    def when(self) -> str:
        return f"in step {self.step}" if self.since is None else f"between step {self.since} and step {self.step}"

    @property
    def sizes_differ(self) -> bool:
        return self.differs in ("elements", "dtype")


@cache
def find_mispairing(run: RunView) -> Mispairing | None:
    """None when every collective met its like, as far as the pages tell."""
    if not run.is_whole or counts_differ_rightly(run) or len(run.ranks) < 2:
        return None
    return _search(run, kept=True) or _search(run, kept=False)


def _search(run: RunView, kept: bool) -> Mispairing | None:
    """In the pages that the launcher kept when it first saw a difference, or in those of the end."""
    tables = {view.rank: slots_of(view, view.mispaired_marks if kept else view.marks) for view in run.ranks}
    if not all(tables.values()):
        return None
    first = max(min(table) for table in tables.values())
    last = min(max(table) for table in tables.values())
    for sequence in range(first, last + 1):
        slots = [table[sequence] for table in tables.values() if sequence in table]
        if len(slots) == len(tables) and len({slot.meaning for slot in slots}) > 1:
            found = _explain(run, tables, tuple(slots))
            is_seen_late = any(sequence - 1 not in table for table in tables.values())
            return replace(found, since=_last_equal(run, kept, found.step)) if is_seen_late else found
    return None


def _last_equal(run: RunView, kept: bool, before: int) -> int | None:
    """The newest step before this one at whose end all ranks had begun equally many collectives; None for this one itself,
    and where none is known."""
    pages = [view.mispaired if kept else view.page for view in run.ranks]
    tables = [page.counts_by_step() for page in pages if page is not None]
    steps = set(tables[0]).intersection(*tables[1:])
    last = max((step for step in steps if step <= before and len({table[step] for table in tables}) == 1), default=0)
    return last if 0 < last < before else None


def counts_differ_rightly(run: RunView) -> bool:
    """Sends count in the sequence too, differently on each rank, and a rank that has joined answers for others, so that
    counts say nothing."""
    return any(view.named("point-to-point") or view.named("join") for view in run.ranks)


def _explain(run: RunView, tables: dict[int, dict[int, Slot]], slots: tuple[Slot, ...]) -> Mispairing:
    skipped = _find_skipped_backward(tables, slots)
    if skipped is not None:
        return skipped
    step, turn = min(slot.step for slot in slots), min(slot.turn for slot in slots)
    departed: list[tuple[int, Act | None, Act | None]] = []
    for rank, table in tables.items():
        shapes = _shapes(table)
        habit = _habit(shapes, turn)
        if habit is None:
            continue
        difference = _first_difference(shapes.get(turn, ()), habit, complete=max(shapes) > turn)
        if difference is not None:
            departed.append((rank, *difference))
    is_silent = _is_silent(tables, slots)
    operations = {slot.operation for slot in slots}
    comparable = operations <= set(EQUAL_SIZES) and not operations <= set(_SHARDED)
    if len(operations) == 1 and (comparable or _difference(slots) == "root"):
        return Mispairing(slots, step, is_silent, differs=_difference(slots))
    odd, expected, got = departed[0] if len(departed) == 1 else (None, None, None)
    unfinished = odd is not None and max(slot.turn for slot in tables[odd].values()) <= turn
    return Mispairing(slots, step, is_silent, odd, expected=expected, got=got, unfinished=unfinished)


def _is_silent(tables: dict[int, dict[int, Slot]], slots: tuple[Slot, ...]) -> bool:
    return all(max(table) > slots[0].sequence for table in tables.values())


def _find_skipped_backward(tables: dict[int, dict[int, Slot]], slots: tuple[Slot, ...]) -> Mispairing | None:
    """Gradients of one forward that met those of a later one: a rank had none for the first."""
    if {slot.operation for slot in slots} != {"gradients"}:
        return None
    first = min(slots, key=lambda slot: slot.turn)
    skipped = [
        slot.rank
        for slot in slots
        if not any(one.operation == "gradients" and one.turn == first.turn for one in tables[slot.rank].values())
    ]
    if len(skipped) != 1:
        return None
    step = min(slot.step for slot in slots)
    return Mispairing(slots, step, _is_silent(tables, slots), skipped[0], expected=(first.operation, first.site))


def _difference(slots: tuple[Slot, ...]) -> str:
    """In what the same call differs between ranks; empty where they called different lines."""
    if len({slot.site for slot in slots}) > 1:
        return ""
    return next(
        (name for name in ("root", "dtype", "elements") if len({getattr(slot, name) for slot in slots}) > 1), ""
    )


def _shapes(table: dict[int, Slot]) -> dict[int, tuple[Act, ...]]:
    """What each turn consisted of."""
    shapes: dict[int, list[Act]] = {}
    for sequence in sorted(table):
        slot = table[sequence]
        shapes.setdefault(slot.turn, []).append((slot.operation, slot.site))
    return {turn: tuple(acts) for turn, acts in shapes.items()}


def _habit(shapes: dict[int, tuple[Act, ...]], turn: int) -> tuple[Act, ...] | None:
    earlier = sorted(one for one in shapes if one < turn)[1:]  # the first may be cut off, or hold what happens once
    counts = Counter(shapes[one] for one in earlier)
    if not counts:
        return None
    shape, times = counts.most_common(1)[0]
    return shape if times >= _MIN_HISTORY and 2 * times > len(earlier) else None


def _first_difference(
    acts: tuple[Act, ...], habit: tuple[Act, ...], complete: bool
) -> tuple[Act | None, Act | None] | None:
    """Expected and got at the first place where a turn departs from the habit; None where it does not. Nothing was
    expected of what came in addition, before the turn went on as usual."""
    for index, act in enumerate(acts):
        if index >= len(habit):
            return None, act
        if act != habit[index]:
            is_extra = act not in habit and habit[index] in acts[index + 1 :]
            return None if is_extra else habit[index], act
    return (habit[len(acts)], None) if complete and len(acts) < len(habit) else None

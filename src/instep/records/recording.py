"""The page of a rank: what it is doing now and did last, in shared memory that outlives it.

The rank writes with `struct.pack_into` (no lock, well under a microsecond), in short steps some marks at a time; the launcher
and `instep diagnose` read the same layout from the file. A mark may be torn when the rank dies in the middle of writing it;
readers drop such marks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"istp"
VERSION = 1

HEADER = struct.Struct("<4sIiii4xdd")  # magic, version, pid, rank, world size, monotonic and wall clock at start
NUM_MARKS = 40  # u64: marks written so far
NUM_STEPS = 48  # u64: optimizer steps ended so far
BEAT = 56  # f64, monotonic: the watching thread of the rank is alive
FORWARDS_SEEN = 64  # u64: module calls noticed by sampling the stack
LAST_ENQUEUED = 72  # i64: newest collective given to the backend, -1 unknown
LAST_COMPLETED = 80  # i64
REQUEST = 88  # u64, written by the launcher: number of the snapshot it asks for
ANSWER = 96  # u64: number of the snapshot that is complete
COMPILING = 104  # u64: 1 while a compiler runs in the rank
RESIDENT_BYTES = 112  # u64
NUM_BATCHES = 120  # u64: batch prints written so far
SECONDS = 128  # f64 x 16: time spent by kind, see SECONDS_OF
ELSEWHERE = (
    256  # u64: 1 while the innermost Python line of the main thread is none of torch's, so that it waits for no one
)
MARKS = 512
NUM_MARK_SLOTS = 2048
STEPS = MARKS + NUM_MARK_SLOTS * 40
NUM_STEP_SLOTS = 512
BATCHES = STEPS + NUM_STEP_SLOTS * 56
NUM_BATCH_SLOTS = 512
PAGE_BYTES = BATCHES + NUM_BATCH_SLOTS * 48

U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")
F64 = struct.Struct("<d")
MARK = struct.Struct("<BBHIQIIQd")  # kind, operation, flags, site, sequence number, step, count, elements, monotonic
STEP = struct.Struct("<QQIIIIIIdd")  # step, sequence, turns, reduced backwards, backwards, batches, calls, site, lr, t
BATCH = struct.Struct("<IIIIQQQQ")  # loader, pass, index, flags, prints of up to four tensors

KINDS: tuple[str, ...] = (
    "none",
    "enter-collective",
    "leave-collective",
    "enter-data",
    "leave-data",
    "data-ended",
    "enter-forward",
    "leave-forward",
    "enter-backward",
    "leave-backward",
    "enter-step",
    "leave-step",
    "ended",
)
KIND_NUMBER = {name: number for number, name in enumerate(KINDS)}

OPERATIONS: tuple[str, ...] = (
    "",
    "all_reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "monitored_barrier",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
    "new_group",
    "init_process_group",
    "destroy_process_group",
    "all_gather_single",
    "reduce_scatter_single",
    "wait",  # for an operation that was started before
)
OPERATION_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
POINT_TO_POINT = frozenset(
    ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
)

ASYNC, OTHER_GROUP, OTHER_THREAD, UNSYNCED, NO_GRAPH, NO_GRAD, EVALUATING = (1 << bit for bit in range(7))
GROUP_BITS = 8  # of the flags, above these: a number for the process group, 0 for the default one
TRAINED = 1  # flag of a batch print: gradients were computed from it

# Of the first tensor that is passed to a collective; 0 stands for one that is not known.
DTYPES: tuple[str, ...] = (
    "",
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)
_ELEMENT_BITS = 40

SECONDS_OF = (
    *("data", "forward", "backward", "backward_cpu", "step", "collective", "total", "steps", "usual_own"),
    "delayed",  # ready to run and without a core
)


def pack_group(number: int) -> int:
    """A number of a process group, as it goes into the flags."""
    return (number % 255 + 1) << GROUP_BITS


def pack_batch(sends: int, receives: int) -> int:
    """What a batch of transfers consists of, as it goes into the number of elements."""
    return sends << 32 | receives


def pack_given(elements: int, dtype: int, root: int) -> int:
    """What was passed to a collective, as it goes into the number of elements. root: -1 for none."""
    return min(elements, (1 << _ELEMENT_BITS) - 1) | dtype << _ELEMENT_BITS | (root + 1 & 0xFFFF) << _ELEMENT_BITS + 8


@dataclass(frozen=True)
class Mark:
    """One moment in the life of a rank. site: number of a call site, named in the rank's events; count: for a transfer
    between two ranks the other one, counted from 1; elements: see `given` for what was passed to a collective."""

    kind: str
    operation: str
    flags: int
    site: int
    sequence: int
    step: int
    count: int
    elements: int
    when: float

    @property
    def given(self) -> tuple[int, str, int | None]:
        """Elements, dtype and root of what was passed to a collective; empty and None where they are not known."""
        dtype, root = self.elements >> _ELEMENT_BITS & 0xFF, self.elements >> _ELEMENT_BITS + 8
        name = DTYPES[dtype] if dtype < len(DTYPES) else ""
        return self.elements & (1 << _ELEMENT_BITS) - 1, name, root - 1 if root else None

    @property
    def transfers(self) -> tuple[int, int]:
        """Sends and receives of the call; 0 and 0 when that is not known."""
        if self.operation == "batch_isend_irecv":
            return self.elements >> 32, self.elements & 0xFFFFFFFF
        sends = self.operation in ("send", "isend", "send_object_list")
        return (1, 0) if sends else (0, 1)

    @property
    def group(self) -> int:
        """Equal on all ranks for one process group; 0 for the default one."""
        return self.flags >> GROUP_BITS


@dataclass(frozen=True)
class StepMark:
    """The end of an optimizer step: how much had happened in the rank so far. turns: forwards whose backward averages;
    reduced: averages of gradients, of which those count once that were used or cleared before the step."""

    step: int
    sequence: int
    turns: int
    reduced: int
    backwards: int
    batches: int
    calls: int
    site: int
    rate: float
    when: float


@dataclass(frozen=True)
class BatchPrint:
    """A few bits of a batch's content, enough to tell whether two ranks have the same one."""

    loader: int
    lap: int
    index: int
    flags: int
    prints: tuple[int, ...]


@dataclass(frozen=True)
class Page:
    """A page as it was when it was read."""

    data: bytes

    def _u64(self, offset: int) -> int:
        return U64.unpack_from(self.data, offset)[0]

    def _f64(self, offset: int) -> float:
        return F64.unpack_from(self.data, offset)[0]

    @property
    def pid(self) -> int:
        return HEADER.unpack_from(self.data)[2]

    @property
    def rank(self) -> int:
        return HEADER.unpack_from(self.data)[3]

    @property
    def world_size(self) -> int:
        return HEADER.unpack_from(self.data)[4]

    @property
    def started(self) -> float:
        return HEADER.unpack_from(self.data)[5]

    def by_wall_clock(self, when: float) -> float:
        """A time of the rank's monotonic clock in seconds since the epoch."""
        monotonic, wall = HEADER.unpack_from(self.data)[5:7]
        return wall + when - monotonic

    def by_own_clock(self, when: float) -> float:
        """Seconds since the epoch as a time of the rank's monotonic clock."""
        monotonic, wall = HEADER.unpack_from(self.data)[5:7]
        return monotonic + when - wall

    @property
    def num_marks(self) -> int:
        return self._u64(NUM_MARKS)

    @property
    def num_steps(self) -> int:
        return self._u64(NUM_STEPS)

    @property
    def beat(self) -> float:
        return self._f64(BEAT)

    @property
    def forwards_seen(self) -> int:
        return self._u64(FORWARDS_SEEN)

    @property
    def pending(self) -> bool | None:
        """Whether a collective was handed to the backend and has not come back; None when the backend does not say."""
        enqueued, completed = (I64.unpack_from(self.data, at)[0] for at in (LAST_ENQUEUED, LAST_COMPLETED))
        return None if enqueued < 0 else completed < enqueued

    @property
    def answer(self) -> int:
        return self._u64(ANSWER)

    @property
    def compiling(self) -> bool:
        return self._u64(COMPILING) != 0

    @property
    def is_elsewhere(self) -> bool:
        return self._u64(ELSEWHERE) != 0

    @property
    def resident_bytes(self) -> int:
        return self._u64(RESIDENT_BYTES)

    @property
    def seconds(self) -> dict[str, float]:
        return {name: self._f64(SECONDS + 8 * i) for i, name in enumerate(SECONDS_OF)}

    def marks(self, newest: int = NUM_MARK_SLOTS) -> list[Mark]:
        """The newest marks, oldest first."""
        end = self.num_marks
        found: list[Mark] = []
        for index in range(max(0, end - min(newest, NUM_MARK_SLOTS)), end):
            row: tuple[Any, ...] = MARK.unpack_from(self.data, MARKS + index % NUM_MARK_SLOTS * MARK.size)
            if 0 < row[0] < len(KINDS) and row[1] < len(OPERATIONS):
                found.append(Mark(KINDS[int(row[0])], OPERATIONS[int(row[1])], *row[2:]))
        return found

    def last_mark(self) -> Mark | None:
        """What the main thread did last."""
        for size in (1, 8, 64):
            own = [mark for mark in self.marks(size) if not mark.flags & OTHER_THREAD]
            if own:
                return own[-1]
        return None

    @property
    def last_mark_kind(self) -> str:
        mark = self.last_mark()
        return mark.kind if mark is not None else ""

    def step_mark(self, step: int) -> StepMark | None:
        """The mark of a step, or None when it was only counted, has been overwritten or is still to come. Steps count from 1."""
        if not 0 < step <= self.num_steps:
            return None
        values = STEP.unpack_from(self.data, _step_at(step))
        return StepMark(*values) if values[0] == step else None

    def counts_by_step(self) -> dict[int, tuple[int, int]]:
        """Collectives and forwards until the end of each step that has a mark; of short steps only some have one."""
        rows: Iterator[tuple[Any, ...]] = STEP.iter_unpack(self.data[STEPS:BATCHES])
        return {row[0]: (row[1], row[2]) for row in rows if 0 < row[0] <= self.num_steps}

    def step_marks(self) -> list[StepMark]:
        """All that are there, oldest first."""
        return [StepMark(*STEP.unpack_from(self.data, _step_at(step))) for step in sorted(self.counts_by_step())]

    @property
    def newest_step_mark(self) -> StepMark | None:
        return next(reversed(self.step_marks()), None)

    def batch_prints(self) -> list[BatchPrint]:
        count = min(self._u64(NUM_BATCHES), NUM_BATCH_SLOTS)
        rows = (BATCH.unpack_from(self.data, BATCHES + index * BATCH.size) for index in range(count))
        return [BatchPrint(row[0], row[1], row[2], row[3], row[4:]) for row in rows]


def _step_at(step: int) -> int:
    return STEPS + (step - 1) % NUM_STEP_SLOTS * STEP.size


def read_page(path: Path) -> Page | None:
    """The page in a file, or None when there is none (yet) or it is of another version."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return check_page(data)


def check_page(data: bytes) -> Page | None:
    if len(data) < PAGE_BYTES or HEADER.unpack_from(data)[:2] != (MAGIC, VERSION):
        return None
    return Page(data)

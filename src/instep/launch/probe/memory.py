"""Memory that grows because the script keeps losses together with the graphs that made them."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch

from instep.launch.probe.holders import Held, Holders, find_place, parts_of
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.sites import is_users_file
from instep.records import recording as layout

_EVERY_STEPS = 8
_SCAN_BYTES = 3 << 20
_EVERY_SECONDS = 0.1  # reading the size of a process takes 50 us
_GROWTH_BYTES = 24 << 20  # less than this is the allocator's noise
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CO_OPTIMIZED = 1
_HELD_LOOKS, _MOST_ITEMS = 4, 20_000
_LARGE_BYTES = 1 << 20  # of a single tensor that may be one that grows
_AGAIN = 1.25  # noted again when it has grown by so much more
_MOST_NODES = 6000  # of a graph, counted

OPERATIONS = " (operations)"  # after a name: what is counted is the length of a graph, not tensors

_looked = [0.0]
_baseline = [0]
_scanned = [0]  # bytes used when variables were last looked through
_seen: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}  # step, results kept, bytes used
_held: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}  # step, tensors, their bytes
_noted: dict[tuple[str, str, str], int] = {}  # bytes when it was noted last
_elsewhere: dict[int, list[tuple[int, Held, int]]] = {}  # by container: step, what it held, bytes used
_HOLDERS = Holders()


@contained
def look_for_kept_graphs(recorder: Recorder) -> None:
    step, when = recorder.num_steps, time.monotonic()
    if step % _EVERY_STEPS or when - _looked[0] < _EVERY_SECONDS:
        return
    _looked[0] = when
    now = read_used_bytes()
    layout.U64.pack_into(recorder.page, layout.RESIDENT_BYTES, now)
    if not _baseline[0]:
        _baseline[0] = now
        recorder.log.note("memory", used=now)
        return
    if step & (step - 1) == 0:
        recorder.log.note("memory", used=now)
    if now - _baseline[0] < _GROWTH_BYTES or now - _scanned[0] < _SCAN_BYTES:
        return  # looking through variables takes a millisecond: only while memory grows
    _scanned[0] = now
    for key, count, line in _kept_in_frames(sys._getframe(1)):
        _follow(recorder, key, count, line, now)
    for key, held, line in held_in_frames(sys._getframe(1)):
        _follow_held(recorder, key, held, line)
    _look_elsewhere(recorder, now)


def _look_elsewhere(recorder: Recorder, used: int) -> None:
    """What no variable of a running function shows, while nothing else explains the growth."""
    for container, held in _HOLDERS.look(used - _baseline[0]) if not _noted else ():
        looks = _elsewhere.setdefault(id(container), [])
        if looks and held.tensors <= looks[-1][1].tensors:
            continue
        looks.append((recorder.num_steps, held, used))
        place = find_place(container) if len(looks) >= 3 else None
        for look in looks if place is not None else ():
            _tell(recorder, (place.file, place.function, place.name), look)  # type: ignore[union-attr]


def _tell(recorder: Recorder, key: tuple[str, str, str], look: tuple[int, Held, int]) -> None:
    step, held, used = look
    if held.graphs:
        _follow(recorder, key, held.graphs, 0, used, step)
    else:
        _follow_held(recorder, key, (held.tensors, held.size), 0, step)


def read_used_bytes() -> int:
    """Memory of the device that the rank uses, or of the process on a CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _follow(
    recorder: Recorder, key: tuple[str, str, str], count: int, line: int, used: int, step: int | None = None
) -> None:
    """A variable that holds more graphs each time we look, while memory grows with it, is what holds the memory."""
    history = _seen.setdefault(key, [])
    if not history or count > history[-1][1]:
        history.append((recorder.num_steps if step is None else step, count, used))
    growth = history[-1][2] - history[0][2]
    if len(history) >= 3 and growth >= _GROWTH_BYTES // 2 and key not in _noted:
        _noted[key] = growth
        file, function, name = key
        recorder.log.note(
            "kept-graphs",
            file=file,
            function=function,
            name=name,
            line=line,
            history=[row[:2] for row in history],
            growth=growth,
        )


def _follow_held(
    recorder: Recorder, key: tuple[str, str, str], held: tuple[int, int], line: int, step: int | None = None
) -> None:
    """A list of tensors without graphs that has only grown, by much, in all looks so far."""
    history = _held.setdefault(key, [])
    if history and held[1] < history[-1][2]:
        history.clear()  # emptied in between: a buffer that is used up
    if not history or held[1] > history[-1][2]:
        history.append((recorder.num_steps if step is None else step, *held))
    growth = history[-1][2] - history[0][2]
    if len(history) >= _HELD_LOOKS and growth >= max(_GROWTH_BYTES, _AGAIN * _noted.get(key, 0)):
        _noted[key] = growth
        file, function, name = key
        facts = {"file": file, "function": function, "name": name, "line": line, "growth": growth}
        recorder.log.note("kept-tensors", history=[list(row) for row in history[-6:]], **facts)


def held_in_frames(frame: FrameType | None) -> list[tuple[tuple[str, str, str], tuple[int, int], int]]:
    """Lists and dictionaries of tensors or arrays in the script's variables: how many, and how many bytes."""
    found = []
    for owner, values in user_frames(frame):
        code = owner.f_code
        file = os.path.abspath(code.co_filename)
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.nbytes >= _LARGE_BYTES:
                found.append(((file, code.co_name, name), (len(value), value.nbytes), owner.f_lineno))
            for place, items in _containers(name, value):
                held = [size for item in items for size in _sizes(item)]
                if len(held) >= 8:
                    found.append(((file, code.co_name, place), (len(held), sum(held)), owner.f_lineno))
    return found


def _sizes(item: Any) -> list[int]:
    """Bytes of the tensors and arrays that an item is, or holds as a record does."""
    return [part.nbytes for part in parts_of(item) if isinstance(part, (torch.Tensor, np.ndarray))]


def _containers(name: str, value: Any) -> Iterator[tuple[str, list[Any]]]:
    """The variable itself, or attributes of an object of the script's own; a deque with an end is none."""
    if isinstance(value, list):
        yield name, value[:_MOST_ITEMS]
    elif isinstance(value, dict):
        yield name, list(value.values())[:_MOST_ITEMS]
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, torch.optim.Optimizer, type)):
        module = sys.modules.get(type(value).__module__)
        if is_users_file(getattr(module, "__file__", None) or "<built in>"):
            for key, item in list(vars(value).items())[:50]:
                if isinstance(item, (list, dict)):
                    yield from _containers(f"{name}.{key}", item)


def user_frames(frame: FrameType | None) -> Iterator[tuple[FrameType, dict[str, Any]]]:
    """Frames of the script on this stack with their variables."""
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename):
            values = dict(frame.f_locals)
            if code.co_flags & _CO_OPTIMIZED and sys.version_info < (3, 13):
                frame.f_locals.clear()  # the snapshot would keep batches and graphs alive until the function ends
            yield frame, values
        frame = frame.f_back


def _kept_in_frames(frame: FrameType | None) -> list[tuple[tuple[str, str, str], int, int]]:
    found = []
    for owner, values in user_frames(frame):
        code = owner.f_code
        for name, value in values.items():
            for place, count in _kept_in(name, value, 0):
                found.append(((os.path.abspath(code.co_filename), code.co_name, place), count, owner.f_lineno))
    return found


def _kept_in(name: str, value: Any, depth: int) -> list[tuple[str, int]]:
    """Names of the places under a variable that hold results with their graphs, and how many."""
    if isinstance(value, torch.Tensor):
        length = graph_length(value)
        return [(f"{name}{OPERATIONS}", length)] if length >= 3 else []
    if isinstance(value, (list, deque, tuple)):
        graphs = [item for item in value if isinstance(item, torch.Tensor) and item.grad_fn is not None]
        return [(name, len(graphs)), *_kept_in(name, graphs[-1], 2)] if graphs else []
    if isinstance(value, dict) and depth < 2:
        graphs = [item for item in value.values() if isinstance(item, torch.Tensor) and item.grad_fn is not None]
        own = len(graphs)
        inner = [row for key, item in list(value.items())[:50] for row in _kept_in(f"{name}[{key!r}]", item, depth + 1)]
        return [(name, own), *_kept_in(name, graphs[-1], 2)] if own > 3 else inner
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None) or ""
    if (
        depth < 2
        and file
        and is_users_file(file)
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.nn.Module)
    ):
        return [
            row for key, item in list(vars(value).items())[:50] for row in _kept_in(f"{name}.{key}", item, depth + 1)
        ]
    return []


def graph_length(value: torch.Tensor) -> int:
    """Operations behind a tensor: a running sum, or a state that is handed from step to step, keeps those of all steps."""
    seen: set[Any] = set()
    queue = [value.grad_fn]
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [parent for parent, _ in node.next_functions]
    return len(seen)

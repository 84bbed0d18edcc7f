"""On a few sampled steps: where the host waits for the device, how often, and for how long.

CUDA itself tells of a wait (`torch.cuda.set_sync_debug_mode`), by a warning. That is switched on inside of single calls only,
so that no warning can meet a filter of the script's. Between sampled steps nothing is wrapped, without CUDA nothing ever is.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.sites import is_users_file
from instep.records import recording as layout

# No common period with what scripts do every few steps; a line that waits in each of them waits in every step.
SAMPLED_STEPS = frozenset((12, 13, 15, 18, 22, 27, 33, 39, 46, 59, 77, 101, 143, 211, 307, 523, 1021))
_DATA = layout.SECONDS_OF.index("data")
_OURS = f"{__name__.partition('.')[0]}."
_MOST_LINES = 20
_TOLD = "called a synchronizing CUDA operation"
_FILTER = ("always", re.compile(rf"{_TOLD}|Synchronization debug mode is a prototype"), Warning, None, 0)
_ABSENT = object()
_READ = ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__")
_MOVE = ("to", "cuda", "copy_")
_INDEX = ("__getitem__", "__setitem__")
_WATCHED: tuple[tuple[Any, str], ...] = (
    *((torch.Tensor, name) for name in (*_READ, *_MOVE, *_INDEX)),
    *((torch, name) for name in ("nonzero", "masked_select")),
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
)


class Cuda:
    """What is asked of the device; another one stands in for it in tests."""

    def can_tell(self) -> bool:
        """Whether CUDA is in use, and its warnings are free for us."""
        if not torch.cuda.is_initialized() or getattr(sys.flags, "context_aware_warnings", 0):
            return False
        return torch.cuda.get_sync_debug_mode() == 0

    def tell(self, on: bool) -> None:
        torch.cuda.set_sync_debug_mode(int(on))

    def is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda


class HostWaits:
    """`look` is called after each optimizer step; a sample is what happens until the next one."""

    def __init__(self, recorder: Recorder, device: Cuda | None = None) -> None:
        self._recorder = recorder
        self._device = device or Cuda()
        self._is_sampling = False
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was its own before, ours
        self._lines: dict[tuple[int, str, str], list[float]] = {}  # site, call, by way of: how often, seconds
        self._heard = 0
        self._inside = False
        self._began = self._data = 0.0

    def is_turn(self, step: int) -> bool:
        return self._is_sampling or step in SAMPLED_STEPS

    @contained
    def look(self, now: float) -> None:
        if self._is_sampling:
            self._end(now)
        if self._recorder.num_steps in SAMPLED_STEPS and self._device.can_tell():
            self._begin()

    def _begin(self) -> None:
        self._is_sampling = True
        self._lines.clear()
        self._data = self._recorder.seconds[_DATA]
        for owner, name in _WATCHED:
            original = getattr(owner, name, None)
            if original is not None:
                wrapper = self._wrap(original, name)
                self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), wrapper))
                setattr(owner, name, wrapper)
        self._began = time.monotonic()

    def _end(self, now: float) -> None:
        self._is_sampling = False
        for owner, name, before, wrapper in self._replaced:
            if vars(owner).get(name) is wrapper and before is _ABSENT:
                delattr(owner, name)
            elif vars(owner).get(name) is wrapper:
                setattr(owner, name, before)
        self._replaced.clear()
        rows = sorted(self._lines.items(), key=lambda row: -row[1][1])[:_MOST_LINES]
        self._recorder.log.note(
            "host-waits",
            seconds=round(now - self._began, 6),
            data=round(self._recorder.seconds[_DATA] - self._data, 6),
            lines=[
                {"site": site, "call": call, "through": through, "count": int(count), "seconds": round(seconds, 6)}
                for (site, call, through), (count, seconds) in rows
            ],
        )

    def _wrap(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        is_certain = name == "synchronize"  # waits by its meaning; CUDA does not tell of it

        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if not self._is_sampling or not self._concerns(name, args) or self._is_other(frame):
                return original(*args, **kwargs)
            before = self._listen()
            started = time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                self._stop_listening(before)
                if is_certain or self._heard:
                    self._add(name, frame, time.monotonic() - started)

        return call

    def _concerns(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether the call can make the host wait: left out is what is on the host, and an index that is no mask."""
        if name in _READ:
            return bool(args) and isinstance(args[0], torch.Tensor) and self._device.is_there(args[0])
        if name in _INDEX:
            index = args[1] if len(args) > 1 else None
            parts = index if isinstance(index, tuple) else (index,)
            return any(isinstance(part, torch.Tensor) and self._device.is_there(part) for part in parts)
        return True

    def _is_other(self, frame: FrameType) -> bool:
        """A call from within a watched one, of another thread, of a compiler, or of this package."""
        return (
            self._inside
            or threading.get_ident() != self._recorder.main_thread
            or torch.compiler.is_compiling()
            or _is_ours(frame)
        )

    @contained
    def _listen(self) -> Any:
        """Hears CUDA's warnings, and nobody else does. Returns what showed warnings before."""
        self._inside, self._heard = True, 0
        shows = warnings.showwarning

        def showwarning(message: Any, *args: Any, **kwargs: Any) -> None:
            if _TOLD in str(message):
                self._heard += 1
            elif _FILTER[1].match(str(message)) is None:
                shows(message, *args, **kwargs)

        warnings.showwarning = showwarning
        warnings.filters.insert(0, _FILTER)  # type: ignore[union-attr]  # a list, whatever the stubs say
        self._device.tell(True)
        return shows

    @contained
    def _stop_listening(self, shows: Any) -> None:
        self._inside = False
        self._device.tell(False)
        if shows is not None:
            warnings.showwarning = shows
        if _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)  # type: ignore[union-attr]

    @contained
    def _add(self, name: str, frame: FrameType, seconds: float) -> None:
        key = (self._recorder.sites.here(2), name, _way(frame))
        row = self._lines.setdefault(key, [0, 0.0])
        row[0] += 1
        row[1] += seconds


def _is_ours(frame: FrameType | None) -> bool:
    """Whether this package asked for the value, by itself or through a function of torch's: nothing a script can change."""
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        if frame.f_globals.get("__name__", "").startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def _way(frame: FrameType | None) -> str:
    """The function of a library that the user's line called, as `clip_grad_norm_`; empty when there is none between."""
    way = ""
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        way = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        frame = frame.f_back
    return way if frame is not None else ""

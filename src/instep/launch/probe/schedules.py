"""Learning-rate schedules: how long each was made to be, and how often it is stepped beside the optimizer."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler

from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained

_FIRST_NOTE = 32
_LENGTHS = ("total_steps", "T_max", "total_iters")  # of OneCycleLR, CosineAnnealingLR, LinearLR and the like
_IN_CLOSURES = ("num_training_steps",)  # of the functions that transformers makes
_OF_TORCH = lr_scheduler.__file__


class Schedule:
    """One scheduler. first_step: optimizer steps of the rank before it was first stepped."""

    def __init__(self, number: int, site: int, kind: str, length: int | None) -> None:
        self.number, self.site, self.kind, self.length = number, site, kind, length
        self.calls = self.step_site = self.first_step = self.last_step = 0
        self.library = ""


class Schedules:
    """All schedulers of this rank that the script steps itself."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: weakref.WeakKeyDictionary[Any, Schedule] = weakref.WeakKeyDictionary()
        self._rows: list[Schedule] = []
        atexit.register(self.note)

    @contained
    def add(self, scheduler: Any, site: int) -> None:
        if len(self._rows) < 20 and scheduler not in self._known:
            row = Schedule(len(self._rows) + 1, site, type(scheduler).__name__, find_length(scheduler))
            self._known[scheduler] = row
            self._rows.append(row)

    @contained
    def count(self, scheduler: Any) -> None:
        row, caller = self._known.get(scheduler), sys._getframe(3).f_code.co_filename
        if row is None or caller == _OF_TORCH:
            return  # one inside of another
        recorder = self._recorder
        if not row.calls:
            row.first_step = recorder.num_steps
            row.library = "accelerate" if f"{os.sep}accelerate{os.sep}" in caller else ""
            row.step_site = recorder.sites.here(3)
        row.calls += 1
        row.last_step = recorder.num_steps
        if row.calls >= _FIRST_NOTE and row.calls & (row.calls - 1) == 0:
            self.note()

    @contained
    def note(self) -> None:
        for row in self._rows:
            if row.calls:
                self._recorder.log.note("schedule", **vars(row))


def find_length(scheduler: Any) -> int | None:
    """Steps after which the schedule is at its end; None for one without an end."""
    for name in _LENGTHS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    for function in getattr(scheduler, "lr_lambdas", ()):
        if isinstance(function, functools.partial):
            for name in _IN_CLOSURES:
                if isinstance(function.keywords.get(name), int):
                    return function.keywords[name]
    return None


def watch_schedules(recorder: Recorder) -> None:
    schedules = Schedules(recorder)
    replace(lr_scheduler.LRScheduler, "__init__", lambda original: _wrap_made(recorder, schedules, original))
    replace(lr_scheduler.LRScheduler, "step", lambda original: _wrap_step(schedules, original))


def _wrap_made(recorder: Recorder, schedules: Schedules, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        site = recorder.sites.here(1)
        original(self, *args, **kwargs)
        schedules.add(self, site)

    return __init__


def _wrap_step(schedules: Schedules, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        schedules.count(self)
        return original(self, *args, **kwargs)

    return step

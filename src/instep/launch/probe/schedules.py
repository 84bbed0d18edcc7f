"""Learning-rate schedules: how long each was made to be, and how often it is stepped beside the optimizer."""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained

_FIRST_NOTE = 32
_ALWAYS, _EVERY = 64, 8  # steps
_LENGTHS = ("total_steps", "T_max", "total_iters")  # of OneCycleLR, CosineAnnealingLR, LinearLR and the like
_IN_CLOSURES = ("num_training_steps",)  # of the functions that transformers makes
_MOST = 20


class Schedule:
    """One scheduler. calls, steps: how often it had been stepped, and optimizers had, since it was made."""

    def __init__(self, number: int, site: int, scheduler: Any, length: int, steps: int) -> None:
        self.number, self.site, self.length = number, site, length
        self.kind = type(scheduler).__name__
        self.scheduler = weakref.ref(scheduler)
        self.before, self.calls, self.steps = steps, 0, 0

    def read(self, steps: int) -> None:
        scheduler = self.scheduler()
        if scheduler is not None:
            self.calls, self.steps = scheduler.last_epoch, steps - self.before


class Schedules:
    """The schedulers of this rank that have an end. `LRScheduler.step` is not wrapped: its warnings name the caller."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._rows: list[Schedule] = []
        atexit.register(self.note)

    @contained
    def add(self, scheduler: Any, site: int) -> None:
        length = find_length(scheduler)
        is_known = any(row.scheduler() is scheduler for row in self._rows)
        if length is not None and not is_known and len(self._rows) < _MOST:
            row = Schedule(len(self._rows) + 1, site, scheduler, length, self._recorder.num_steps)
            self._rows.append(row)

    def before_step(self) -> None:
        """Where there are any; in the first steps always, later now and then."""
        steps = self._recorder.num_steps
        if self._rows and not self._recorder.only_counts and (steps < _ALWAYS or steps % _EVERY == 0):
            self._read(steps)

    @contained
    def _read(self, steps: int) -> None:
        for row in self._rows:
            row.read(steps)
        if steps >= _FIRST_NOTE and steps & (steps - 1) == 0:
            self.note()

    @contained
    def note(self) -> None:
        for row in self._rows:
            if row.calls:
                facts = {"schedule": row.number, "site": row.site, "kind": row.kind, "length": row.length}
                library = "accelerate" if "accelerate.scheduler" in sys.modules else ""
                self._recorder.log.note("schedule", calls=row.calls, steps=row.steps, library=library, **facts)


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

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        schedules.before_step()

    replace(lr_scheduler.LRScheduler, "__init__", lambda original: _wrap_made(recorder, schedules, original))
    register_optimizer_step_pre_hook(before)


def _wrap_made(recorder: Recorder, schedules: Schedules, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        site = recorder.sites.here(1)
        original(self, *args, **kwargs)
        schedules.add(self, site)

    return __init__

"""What single lines of the script cost: collectives that it calls itself, checkpoints, and what its loop does between
the parts of a step; and how many threads it asks for."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.sites import is_users_file
from instep.records import recording as layout

_MOST_LINES, _MOST_STACKS = 6, 12
_PROBE = os.path.join("instep", "launch", "probe")
_NOTE_EVERY = 200  # samples
_PARTS = {layout.KIND_NUMBER[f"enter-{part}"]: part for part in ("data", "forward", "backward", "step", "collective")}


class SiteCosts:
    """Sums since the first steps, which are slower than the rest."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._saves: dict[int, list[float]] = {}
        self._stacks: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
        atexit.register(self.note)

    def add_save(self, site: int, seconds: float) -> None:
        row = self._saves.setdefault(site, [0.0, 0.0])
        row[0] += 1
        row[1] += seconds

    @contained
    def sample(self, frame: FrameType | None) -> None:
        """By the watching thread: which of the script's lines the main thread is in, and in which part of a step."""
        if not self._recorder.num_steps:
            return
        lines: list[tuple[str, int]] = []
        in_model = False
        while frame is not None and len(lines) < _MOST_LINES:
            in_model = in_model or frame.f_code.co_name == "_call_impl"  # of torch.nn.Module
            if is_users_file(frame.f_code.co_filename):
                lines.append((os.path.abspath(frame.f_code.co_filename), frame.f_lineno))
            frame = frame.f_back
        if lines:
            part = _PARTS.get(self._recorder.kind) or ("model" if in_model else "loop")
            self._stacks[(part, tuple(lines))] += 1
            if self._stacks.total() % _NOTE_EVERY == 0:
                self.note()

    @contained
    def note(self) -> None:
        recorder = self._recorder
        collectives = [[site, *row[:2]] for site, row in recorder.costs.items() if not row[2]]
        saves = [[site, *row] for site, row in self._saves.items()]
        stacks = [
            [part, [list(line) for line in lines], n] for (part, lines), n in self._stacks.most_common(_MOST_STACKS)
        ]
        if collectives or saves or stacks:
            recorder.log.note(
                "site-costs", collectives=collectives, saves=saves, stacks=stacks, samples=self._stacks.total()
            )


def add_cost(recorder: Recorder, site: int, seconds: float) -> None:
    """Of a collective that has come back. What torch calls itself, as sharded models do, is no call of the script's."""
    row = recorder.costs.get(site)
    if row is None:
        row = recorder.costs[site] = [0, 0.0, float(is_called_by_torch(sys._getframe(1)))]
    row[0] += 1
    row[1] += seconds


def is_called_by_torch(frame: FrameType | None) -> bool:
    while frame is not None and _PROBE in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename


def watch_site_costs(recorder: Recorder) -> None:
    costs = SiteCosts(recorder)
    recorder.sample_stack = costs.sample
    replace(torch, "save", lambda original: _wrap_save(recorder, costs, original))
    replace(torch, "set_num_threads", lambda original: _wrap_threads(recorder, original))


def _wrap_save(recorder: Recorder, costs: SiteCosts, original: Callable[..., Any]) -> Callable[..., Any]:
    def save(*args: Any, **kwargs: Any) -> Any:
        site, started = recorder.sites.here(1), time.monotonic()
        try:
            return original(*args, **kwargs)
        finally:
            costs.add_save(site, time.monotonic() - started)

    return save


def _wrap_threads(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def set_num_threads(number: int) -> None:
        original(number)
        _note_threads(recorder, number)

    return set_num_threads


@contained
def _note_threads(recorder: Recorder, number: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    recorder.log.note("threads", site=recorder.sites.here(2), threads=int(number), cores=cores, local_ranks=local)

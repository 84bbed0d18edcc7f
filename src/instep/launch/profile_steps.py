"""Records some steps of a rank with PyTorch's profiler (`instep run --profile FIRST:LAST`), without the script's help.

A step is one call of `optimizer.step()`, counted from 0 on the optimizer that steps first. What is recorded before the
first step of all is what the script does from its start.
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import Any


class StepRecorder:
    """Starts the profiler before step `first` and writes the trace after step `last`, or at the program's end."""

    def __init__(self, first: int, last: int, path: Path) -> None:
        self.first = first
        self.last = last
        self.path = path
        self.counted: Any = None
        self.steps_done = 0
        self.profiler: Any = None

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.hook = register_optimizer_step_post_hook(self.after_step)
        atexit.register(self.finish)
        if self.first == 0:
            self.begin()

    def after_step(self, optimizer: Any, *_: Any) -> None:
        self.counted = self.counted or optimizer
        if optimizer is not self.counted:  # a second optimizer, as in a GAN, belongs to the same step
            return
        self.steps_done += 1
        if self.steps_done == self.first:
            self.begin()
        if self.steps_done == self.last + 1:
            self.finish()

    def begin(self) -> None:
        import torch

        self.profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
        self.profiler.start()

    def finish(self) -> None:
        if self.profiler is None:
            return
        profiler, self.profiler = self.profiler, None
        self.hook.remove()
        profiler.stop()
        profiler.export_chrome_trace(str(self.path))
        recorded = min(self.steps_done - 1, self.last)
        print(f"instep: steps {self.first} to {recorded} are recorded in {self.path}", file=sys.stderr)


def record_steps(first: int, last: int, path: Path) -> None:
    """Makes this rank record its steps `first` to `last` into a file that Perfetto and chrome://tracing open."""
    StepRecorder(first, last, path).install()

"""The record of one rank: the step in progress, and the files that finished ones are written to."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from instep.launch.probe.sites import is_users_file
from instep.verify.record.generators import random_state
from instep.verify.record.options import Options
from instep.verify.record.pieces import gather_whole, is_piece
from instep.verify.record.prints import digest, print_tensor
from instep.verify.record.samples import Samples

_WAIT_SECONDS = 20.0  # for the other ranks at the end
_GRACE_SECONDS = 5.0  # for what the script does when it is ended


def users_line(skip: int = 1) -> str:
    """`file:line` of the user's line that led here; empty when there is none."""
    frame = sys._getframe(skip + 1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


class Enough(SystemExit):
    """Ends the script on this rank: the wanted steps are recorded."""


class Recording:
    """One per rank. `prints` of a kind hold one vector per parameter, by the parameter's id until names are known."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.samples = Samples()
        self.models: list[torch.nn.Module] = []  # outermost modules with parameters, in the order of their first call
        self.optimizers: list[int] = []  # ids, in the order of their first step
        self.num_updates = 0
        self.closed = False
        self.skimming = False
        self.wants_next_epoch: Callable[[], bool] = lambda: False
        self.seen_random = ""  # where the generators stood when the newest batch came or a step ended; empty before
        self.watched: list[weakref.ref[Any]] = []  # parameters whose gradients are summed up
        self.local: dict[int, numpy.ndarray[Any, Any]] = {}
        self.reduced: dict[int, numpy.ndarray[Any, Any]] = {}
        self.step = new_step()
        self._folder = Path(options.folder)
        self._lines = open(self._folder / f"rank{self.rank}.jsonl", "w", encoding="utf-8")  # noqa: SIM115

    @property
    def uses_run(self) -> bool:
        """Whether the script trains through instep.Run."""
        return "instep.train.run" in sys.modules

    def note(self, kind: str, **facts: Any) -> None:
        """A fact of the run that belongs to no step."""
        if not self.closed:
            self._lines.write(json.dumps({"kind": kind, "after": self.num_updates, **facts}) + "\n")
            self._lines.flush()

    def finish_update(self, facts: dict[str, Any], arrays: dict[str, Any]) -> None:
        """An optimizer has stepped."""
        if self.closed or self.num_updates >= self.wanted_updates:
            return
        self.num_updates += 1
        numpy.savez(self._folder / f"rank{self.rank}-{self.num_updates}.npz", **arrays)
        source, samples = self.samples.take()
        self.note("update", **self.step, **facts, sample_source=source, samples=samples)
        self.step = new_step()
        self.seen_random = random_state()

    @property
    def wanted_updates(self) -> int:
        return self.options.steps * max(1, len(self.optimizers))

    @property
    def is_done(self) -> bool:
        return self.num_updates >= self.wanted_updates

    def end_script(self) -> None:
        """All is recorded: waits for the other ranks, so that none is left alone in a collective, and ends this one."""
        self.close(None)
        timer = threading.Timer(_GRACE_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()
        raise Enough(0)

    def pass_over(self) -> None:
        """All is recorded, but how the next epoch begins is of interest: goes there without training or saving."""
        if not self.skimming:
            self.skimming = True
            timer = threading.Timer(4 * _GRACE_SECONDS, os._exit, (0,))
            timer.daemon = True
            timer.start()

    def close(self, error: BaseException | None) -> None:
        """The program has ended, by itself, by us or by an exception."""
        if self.closed:
            return
        failed = error is not None and not isinstance(error, Enough) and getattr(error, "code", 1) not in (0, None)
        self.note("end", error=f"{type(error).__name__}: {error}" if failed else None)
        self.closed = True
        self._lines.close()
        (self._folder / f"rank{self.rank}.done").touch()
        if not failed:
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        until = time.monotonic() + _WAIT_SECONDS
        marks = [self._folder / f"rank{rank}.done" for rank in range(self.world_size)]
        while time.monotonic() < until and not all(mark.exists() for mark in marks):
            time.sleep(0.02)


def new_step() -> dict[str, Any]:
    """What is counted during a step."""
    return {
        "backwards": [],  # of each: loss, scale, divisor, whether gradients were to be averaged in it, line
        "clips": [],
        "scheduled": 0,
        "random": None,  # the state of the generator at the first forward
        "drops": False,
        "draws": False,  # whether random numbers were drawn between the batch and its backward, dropout being off
        "batch_norm": False,
        "low_precision": None,
        "outputs": 0,  # elements per sample that the model gives
        "forwards": 0,
        "wrapped_forwards": 0,
        "synced": None,  # of the newest forward through a wrapper
        "gathered": [],
        "metrics": [],
        "tokens": [],
    }


def named(recording: Recording, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """The parameters of an optimizer by name, in the optimizer's order."""
    names: dict[int, str] = {}
    for number, model in enumerate(recording.models):
        inner = unwrap(model)
        prefix = f"model{number}." if len(recording.models) > 1 else ""
        for name, parameter in inner.named_parameters():
            names.setdefault(id(parameter), prefix + plain_name(name))
    found: dict[str, torch.nn.Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            found[names.get(id(parameter), f"group{number}.{place}")] = parameter
    return found


def plain_name(name: str) -> str:
    """Without what torch.compile, FSDP and Lightning Fabric put into it."""
    for part in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.module."):
        name = name.replace(part, "")
    return name.removeprefix("_forward_module.")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's model inside the wrappers that hold it as `module`."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def prints_of(kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, numpy.ndarray[Any, Any]]:
    return {
        f"{kind}/{name}": print_tensor(gather_whole(tensor, tensor) if is_piece(tensor) else tensor)
        for name, tensor in tensors.items()
    }


def digests_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}

"""Backward passes: whether each one averaged the gradients of the wrapped models, and whether the loss was a number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from instep.launch.probe.exits import note_raised
from instep.launch.probe.late_values import LateValues, at_end, can_send
from instep.launch.probe.nonfinite import note_late_nonfinite, note_nonfinite, what_is_sent
from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.tokens import count_tokens, is_token_turn
from instep.launch.probe.wrapping import WRAPPERS
from instep.records import recording as layout

_ENTER, _LEAVE = layout.KIND_NUMBER["enter-backward"], layout.KIND_NUMBER["leave-backward"]
_BACKWARD, _CPU = layout.SECONDS_OF.index("backward"), layout.SECONDS_OF.index("backward_cpu")
_Tensor = torch.Tensor


class Losses:
    """The newest losses of this rank, to tell a sudden NaN from a run that diverged."""

    def __init__(self) -> None:
        self.newest: deque[float] = deque(maxlen=30)
        self.noted = 0
        self.late = LateValues()

    def look_at_arrived(self, recorder: Recorder) -> None:
        """Losses of a device, a step or more after their backward."""
        for value, sent in self.late.arrived():
            if math.isfinite(value):
                self.newest.append(value)
            elif self.noted < 3:
                self.noted += note_late_nonfinite(recorder, value, sent, list(self.newest))

    def send(self, recorder: Recorder, loss: torch.Tensor, site: int) -> None:
        value, sent = what_is_sent(recorder, loss, site, keeps_batch=len(self.late) < 2)
        self.late.send(value, sent)


def watch_backward(recorder: Recorder) -> None:
    losses = Losses()
    at_end(lambda: losses.look_at_arrived(recorder))
    replace(torch.autograd, "backward", lambda original: _wrap(recorder, losses, original))


def _wrap(recorder: Recorder, losses: Losses, original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        loss = args[0] if args else kwargs.get("tensors")
        if recorder.only_counts and _is_usual(losses, loss):
            entered = None
            recorder.backwards += 1
        else:
            entered = _enter(recorder, losses, loss)
        try:
            return original(*args, **kwargs)
        except Exception as error:
            note_raised(recorder, "backward", entered[0] if entered else recorder.sites.here(1), error)
            raise
        finally:
            if not recorder.only_counts:
                _leave(recorder, entered)

    return backward


@contained
def _is_usual(losses: Losses, loss: Any) -> bool:
    """Whether a loss is finite, as far as that can be read without making the host wait for a device."""
    if type(loss) is not _Tensor or not loss.is_cpu or loss.numel() != 1:
        return True
    value = loss.item()
    if value - value != 0:
        return False
    losses.newest.append(value)
    return True


@contained
def _enter(recorder: Recorder, losses: Losses, tensors: Any) -> tuple[int, float, float, bool]:
    site = recorder.sites.here(2)
    if recorder.only_counts:  # and this loss is no number
        recorder.count_batches()
        recorder.wake()
    recorder.depth = 0
    recorder.open_step = None
    recorder.backwards = backwards = recorder.backwards + 1
    if backwards == 1:
        recorder.turns = min(recorder.turns, 1)  # a trial forward on one rank, before training, does not count
    has_graph = True
    if isinstance(tensors, _Tensor):
        has_graph = tensors.grad_fn is not None
        _look_at_loss(recorder, losses, tensors, site)
        if is_token_turn(backwards):
            count_tokens(recorder, tensors, site)
    flags = 0 if has_graph else layout.NO_GRAPH
    started = recorder.mark(_ENTER, 0, flags, site, backwards & 0xFFFFFFFF, recorder.turns)
    for wrapped in WRAPPERS.all:
        wrapped.sequence_before = wrapped.sequence(recorder.sequence)
        wrapped.adds_up = wrapped.is_adding_up()
    return site, started, thread_time(), has_graph


def _look_at_loss(recorder: Recorder, losses: Losses, loss: torch.Tensor, site: int) -> None:
    if loss.numel() != 1 or losses.noted >= 3:
        return
    if not loss.is_cpu:  # to read it now would make the host wait for the device
        if can_send(loss):
            losses.look_at_arrived(recorder)
            losses.send(recorder, loss, site)
        return
    value = loss.item()
    if isinstance(value, complex):
        return
    if math.isfinite(value):
        losses.newest.append(value)
    else:
        losses.noted += note_nonfinite(recorder, loss, site, list(losses.newest))


@contained
def _leave(recorder: Recorder, entered: tuple[int, float, float, bool] | None) -> None:
    """entered: None for a call whose beginning was not watched."""
    if entered is None:
        recorder.mark(_LEAVE)
        return
    site, started, cpu, has_graph = entered
    sequence = recorder.read_sequence(_LEAVE)
    reduced = local = again = False
    for wrapped in WRAPPERS.all:
        if wrapped.expects_reduction and wrapped.sequence(sequence) > wrapped.sequence_before:
            wrapped.expects_reduction = False
            again = again or wrapped.adds_up or not wrapped.reduced_in_step
            wrapped.reduced_in_step += 1
            wrapped.remember_version()
            if wrapped.used is not None:
                wrapped.used.end_backward()
            wrapped.local_since_reduced = 0
            wrapped.backward_site = site
            reduced = True
        elif wrapped.expects_local:
            wrapped.expects_local = False
            wrapped.local_since_reduced += 1
            local = True
    recorder.reduced += again
    if not has_graph:
        recorder.log.note("backward-without-graph", site=site)
    flags = 0 if reduced or not WRAPPERS.all else layout.UNSYNCED
    recorder.seconds[_CPU] += thread_time() - cpu
    recorder.seconds[_BACKWARD] += recorder.mark(_LEAVE, 0, flags, site, int(local)) - started
    recorder.mark_trained()

"""Each forward through a wrapped model: counted, timed, and whether its backward will average gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from instep.launch.probe.exits import note_raised
from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.tensor_prints import print_tensor, tensors_in
from instep.launch.probe.wrapping import WRAPPERS, Wrapped, note_unused
from instep.records import recording as layout

_ENTER, _LEAVE = layout.KIND_NUMBER["enter-forward"], layout.KIND_NUMBER["leave-forward"]
_FORWARD = layout.SECONDS_OF.index("forward")
_PRINTED_FORWARDS = 24
_is_grad_enabled = torch.is_grad_enabled


def watch_forward(recorder: Recorder) -> None:
    replace(DistributedDataParallel, "forward", lambda original: _wrap(recorder, original))


def _wrap(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(self, *args, **kwargs)
        if recorder.only_counts:
            entered = None
            recorder.turns += self.training and self.require_backward_grad_sync and _is_grad_enabled()
        else:
            entered = _enter(recorder, self, args, kwargs)
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            note_unused(recorder, self, error)
            note_raised(recorder, "forward", entered[0] if entered else recorder.sites.here(1), error)
            raise
        finally:
            if not recorder.only_counts:
                _leave(recorder, entered)

    return call


@contained
def _enter(recorder: Recorder, model: DistributedDataParallel, args: Any, kwargs: Any) -> tuple[int, float, int]:
    site = recorder.sites.here(2)
    recorder.depth = 0
    recorder.forwards += 1
    wrapped = WRAPPERS.of_model(model)
    grad = _is_grad_enabled()
    synced = grad and model.require_backward_grad_sync
    number = 0
    if wrapped is not None:
        number = wrapped.number
        wrapped.forwards += 1
        if grad:
            wrapped.forward_since_step = True
            wrapped.expects_reduction, wrapped.expects_local = synced, not synced
            if 1 < wrapped.forwards <= _PRINTED_FORWARDS:
                _print_inputs(recorder, wrapped, args, kwargs, site)
    flags = (0 if synced else layout.UNSYNCED) | (0 if grad else layout.NO_GRAD)
    flags |= 0 if model.training else layout.EVALUATING
    recorder.turns += not flags
    return site, recorder.mark(_ENTER, 0, flags, site, number), number


def _print_inputs(recorder: Recorder, wrapped: Wrapped, args: Any, kwargs: Any, site: int) -> None:
    """Of the first forwards: what the model was called with, in a few bits, to be compared between ranks."""
    leaves = [tensor for _, tensor in (*tensors_in(args), *tensors_in(kwargs))][:4]
    prints = [print_tensor(tensor) for tensor in leaves]
    recorder.log.note("inputs", wrapper=wrapped.number, call=wrapped.forwards, site=site, prints=prints)


@contained
def _leave(recorder: Recorder, entered: tuple[int, float, int] | None) -> None:
    """entered: None for a call whose beginning was not watched."""
    site, started, number = entered or (0, 0.0, 0)
    now = recorder.mark(_LEAVE, 0, 0, site, number)
    if entered is not None:
        recorder.seconds[_FORWARD] += now - started

"""Optimizer steps: counted, timed, and compared with what happened to the gradients before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instep.launch.probe.fingerprints import Fingerprints
from instep.launch.probe.gradients import is_gradient_turn, look_at_gradients
from instep.launch.probe.host_waits import HostWaits
from instep.launch.probe.memory import look_for_kept_graphs
from instep.launch.probe.memory_kinds import note_memory_kinds
from instep.launch.probe.recorder import Recorder, contained, nothing
from instep.launch.probe.step_times import StepTimes
from instep.launch.probe.watched_steps import WatchedSteps
from instep.launch.probe.wrapping import WRAPPERS, Wrapped
from instep.records import recording as layout

_ENTER, _LEAVE = layout.KIND_NUMBER["enter-step"], layout.KIND_NUMBER["leave-step"]
_STEP = layout.SECONDS_OF.index("step")
_EACH_STEPS, _EVERY_STEPS = 64, 8  # after the first of them, what need not be seen in each step is done in every eighth


class Optimizers:
    """Which wrapped models an optimizer updates, and the step that is open."""

    def __init__(self, recorder: Recorder, fingerprints: Fingerprints) -> None:
        self.steps = WatchedSteps(recorder, StepTimes(recorder), fingerprints)
        self.owners: weakref.WeakKeyDictionary[Any, tuple[int, list[Wrapped]]] = weakref.WeakKeyDictionary()
        self._newest: tuple[Callable[[], Any], int, list[Wrapped]] = (
            nothing,
            0,
            [],
        )  # of the owners, the one asked last
        self.site = self.current = 0
        self.started = 0.0

    def wrapped_by(self, optimizer: Any) -> list[Wrapped]:
        reference, number, found = self._newest
        if reference() is optimizer and number == len(WRAPPERS.all):
            return found
        found = self._find(optimizer)
        self._newest = (weakref.ref(optimizer), len(WRAPPERS.all), found)
        return found

    def _find(self, optimizer: Any) -> list[Wrapped]:
        known = self.owners.get(optimizer)
        if known is not None and known[0] == len(WRAPPERS.all):
            return known[1]
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [one for one in WRAPPERS.all if one.ids & ids or {id(p) for p in one.present_parameters()} & ids]
        self.owners[optimizer] = (len(WRAPPERS.all), found)
        return found


def watch_optimizers(recorder: Recorder, fingerprints: Fingerprints) -> None:
    optimizers, waits = Optimizers(recorder, fingerprints), HostWaits(recorder)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not recorder.only_counts:
            _before(recorder, optimizers, optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if recorder.only_counts:
            optimizers.steps.end_counted()
        else:
            _after(recorder, optimizers, waits, optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


@contained
def _before(recorder: Recorder, optimizers: Optimizers, optimizer: Any) -> None:
    if recorder.open_step is not None and recorder.open_step != id(optimizer):
        optimizers.steps.has_nested = True
        return  # a step inside another one, as in optimizers that wrap optimizers
    recorder.open_step = optimizers.current = id(optimizer)
    optimizers.site = site = recorder.sites.here(3)
    optimizers.started = now = recorder.mark(_ENTER, 0, 0, site)
    # A fused optimizer gets infinite gradients from a loss scaler, with a note to leave the step out.
    looks = is_gradient_turn(recorder.num_steps, now) and getattr(optimizer, "found_inf", None) is None
    for wrapped in optimizers.wrapped_by(optimizer):
        if looks:
            look_at_gradients(recorder, wrapped, site, now)
        _judge_gradients(recorder, wrapped, site)


def _judge_gradients(recorder: Recorder, wrapped: Wrapped, site: int) -> None:
    """Whether the gradients that are about to be used have been averaged over the ranks."""
    wrapped.steps += 1
    if wrapped.rests != recorder.rests:  # what led to them was not watched
        wrapped.rests, wrapped.local_since_reduced = recorder.rests, 0
    elif wrapped.local_since_reduced and not wrapped.averaged_by_hand:
        recorder.log.note(
            "local-gradients",
            wrapper=wrapped.number,
            site=site,
            no_sync_site=WRAPPERS.no_sync_site,
            local=wrapped.local_since_reduced,
            reduced=wrapped.reduced_in_step,
        )
    elif not wrapped.reduced_in_step and not wrapped.averaged_by_hand:
        present = wrapped.present_parameters()
        has_gradients = any(p.grad is not None for p in present[:8])
        if has_gradients and wrapped.forward_since_step:
            changed = [str(p.dtype) for p, dtype in zip(wrapped.parameters, wrapped.dtypes) if p.dtype != dtype]
            recorder.log.note(
                "step-without-reduction",
                wrapper=wrapped.number,
                site=site,
                backwards=recorder.backwards,
                cast=changed[0] if changed else None,
                replaced=len(wrapped.ids - {id(p) for p in present}),
            )
        elif has_gradients and not _is_wrapped_anew(wrapped):
            recorder.log.note("forward-past-wrapper", wrapper=wrapped.number, site=site)
            _catch_next_forward(recorder, wrapped)
    wrapped.reduced_in_step = 0
    wrapped.forward_since_step = False


def _is_wrapped_anew(wrapped: Wrapped) -> bool:
    """Whether another wrapper is called that has the same parameters, as in a script that wraps before each stage."""
    return any(one is not wrapped and one.forwards and one.ids & wrapped.ids for one in WRAPPERS.all)


def _catch_next_forward(recorder: Recorder, wrapped: Wrapped) -> None:
    """For one call, notes the user's line that runs the inner model itself. The hook then takes itself off."""
    inner: Any = wrapped.inner()  # the wrapper itself may be gone, when the script went on with what is inside
    if inner is None or wrapped.catching or wrapped.caught >= 3:
        return
    wrapped.catching = True
    handles: list[Any] = []

    def hook(module: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            for handle in handles:
                handle.remove()
            wrapped.catching = False
            wrapped.caught += 1
            recorder.log.note("inner-forward", wrapper=wrapped.number, site=recorder.sites.here(1))

    for part in (inner, *list(inner.children())[:10]):
        handles.append(part.register_forward_pre_hook(hook))


@contained
def _after(recorder: Recorder, optimizers: Optimizers, waits: HostWaits, optimizer: Any) -> None:
    began_unseen = recorder.is_cut and not optimizers.current
    if not began_unseen and (optimizers.current != id(optimizer) or recorder.open_step not in (None, id(optimizer))):
        return  # None: a closure has run a backward meanwhile
    optimizers.current = 0
    recorder.open_step = None
    groups = optimizer.param_groups
    rate = groups[0].get("lr") if groups else 0.0
    recorder.end_step(optimizers.site, float(rate) if isinstance(rate, (int, float)) else 0.0)
    now = recorder.mark(_LEAVE, 0, 0, optimizers.site)
    if not began_unseen:
        recorder.seconds[_STEP] += now - optimizers.started
    step = recorder.num_steps
    if step <= _EACH_STEPS or step % _EVERY_STEPS == 0:
        look_for_kept_graphs(recorder)
        note_memory_kinds(recorder, optimizer)
    if waits.is_turn(step):
        waits.look(now)
    optimizers.steps.end_watched(now)

"""Optimizer steps: counted, timed, and compared with what happened to the gradients before."""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instep.launch.probe.fingerprints import Fingerprints
from instep.launch.probe.gradients import is_gradient_turn, look_at_gradients
from instep.launch.probe.host_waits import HostWaits
from instep.launch.probe.memory import look_for_kept_graphs
from instep.launch.probe.memory_kinds import note_memory_kinds
from instep.launch.probe.pace import Pace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.wrapping import WRAPPERS, Wrapped
from instep.records import recording as layout

_ENTER, _LEAVE = layout.KIND_NUMBER["enter-step"], layout.KIND_NUMBER["leave-step"]
_STEP, _TOTAL, _STEPS, _OWN = (layout.SECONDS_OF.index(name) for name in ("step", "total", "steps", "usual_own"))
_BACKWARD, _CPU = layout.SECONDS_OF.index("backward"), layout.SECONDS_OF.index("backward_cpu")
_BLOCK_STEPS, _BLOCK_SECONDS = 16, 0.25  # at least: ending one takes 50 us
_EACH_STEPS, _EVERY_STEPS = 64, 8  # after the first of them, what need not be seen in each step is done in every eighth
_COLLECTIVE, _DELAYED = layout.SECONDS_OF.index("collective"), layout.SECONDS_OF.index("delayed")


class Optimizers:
    """Which wrapped models an optimizer updates, and the step that is open."""

    def __init__(self, recorder: Recorder) -> None:
        self.pace = Pace(recorder)
        self.owners: weakref.WeakKeyDictionary[Any, tuple[int, list[Wrapped]]] = weakref.WeakKeyDictionary()
        self._newest: tuple[Callable[[], Any], int, list[Wrapped]] = (
            _nothing,
            0,
            [],
        )  # of the owners, the one asked last
        self.site = self.current = 0
        self.started = 0.0
        self.last_end = 0.0
        self.waited = 0.0
        self.own = self.delayed = self.worked = self.next_block = 0.0
        self.counted = 0
        self.blocks: deque[float] = deque(maxlen=32)

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

    def account(self, recorder: Recorder, now: float) -> None:
        """Time from the end of one step to the end of the next, as soon as five backwards have gone by."""
        sums = recorder.seconds
        waited = sums[_COLLECTIVE] + sums[_BACKWARD] - sums[_CPU]
        if not self.last_end:
            if recorder.backwards < 5:
                return
            recorder.reset_seconds()
            waited = 0.0
            self.delayed, self.worked = read_run_delay(), time.thread_time()
            self.pace.begin()
        else:
            sums[_TOTAL] += now - self.last_end
            sums[_STEPS] += 1
            own = now - self.last_end - (waited - self.waited)
            self.own += own
            self.pace.add(own, self.last_end, self._delay_so_far)
            self.counted += 1
            if self.counted >= _BLOCK_STEPS and now >= self.next_block:
                self._end_block(recorder)
                self.next_block = now + _BLOCK_SECONDS
        self.last_end, self.waited = now, waited

    def _delay_so_far(self) -> float:
        """Since the block began: no less than that of the newest step."""
        return read_run_delay() - self.delayed

    def _end_block(self, recorder: Recorder) -> None:
        """The rank's own time per step, without what it waited for a core: a busy machine is nobody's fault."""
        delayed, worked = read_run_delay(), time.thread_time()
        # Delays inside of waits are taken off twice; what the thread has worked is the least there can be.
        own = max(self.own - (delayed - self.delayed), worked - self.worked)
        self.blocks.append(max(0.0, own) / self.counted)
        recorder.spend(_OWN, statistics.median(self.blocks) - recorder.seconds[_OWN])
        recorder.spend(_DELAYED, delayed - self.delayed)
        self.own, self.counted, self.delayed, self.worked = 0.0, 0, delayed, worked


def _nothing() -> None:
    return None


def read_run_delay() -> float:
    """Seconds that this thread was ready to run and had no core; 0 where the kernel does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def watch_optimizers(recorder: Recorder, fingerprints: Fingerprints) -> None:
    optimizers, waits = Optimizers(recorder), HostWaits(recorder)

    @contained
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        _before(recorder, optimizers, optimizer)

    @contained
    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        _after(recorder, optimizers, fingerprints, waits, optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _before(recorder: Recorder, optimizers: Optimizers, optimizer: Any) -> None:
    if recorder.open_step is not None and recorder.open_step != id(optimizer):
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
    if wrapped.local_since_reduced and not wrapped.averaged_by_hand:
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


def _after(
    recorder: Recorder, optimizers: Optimizers, fingerprints: Fingerprints, waits: HostWaits, optimizer: Any
) -> None:
    if optimizers.current != id(optimizer) or recorder.open_step not in (None, id(optimizer)):
        return  # None: a closure has run a backward meanwhile
    optimizers.current = 0
    recorder.open_step = None
    groups = optimizer.param_groups
    rate = groups[0].get("lr") if groups else 0.0
    recorder.end_step(optimizers.site, float(rate) if isinstance(rate, (int, float)) else 0.0)
    now = recorder.mark(_LEAVE, 0, 0, optimizers.site)
    recorder.seconds[_STEP] += now - optimizers.started
    optimizers.account(recorder, now)
    step = recorder.num_steps
    if step >= fingerprints.next_step:
        fingerprints.look(step)
    if step <= _EACH_STEPS or step % _EVERY_STEPS == 0:
        look_for_kept_graphs(recorder)
        note_memory_kinds(recorder, optimizer)
    if waits.is_turn(step):
        waits.look(now)

"""Calls whose order or arguments are wrong in themselves: clipping, loss scaling, schedules, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from instep.launch.probe.nonfinite import SCALED
from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.wrapping import WRAPPERS


def watch_mistakes(recorder: Recorder) -> None:
    scaling = _Scaling(recorder)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for owner in (torch.nn.utils.clip_grad, torch.nn.utils):
            replace(owner, name, lambda original, name=name: _wrap_clip(recorder, scaling, name, original))
    replace(torch.amp.GradScaler, "scale", scaling.wrap_scale)
    replace(torch.amp.GradScaler, "unscale_", scaling.wrap_unscale)
    replace(torch.amp.GradScaler, "update", scaling.wrap_update)
    replace(torch.nn.Module, "load_state_dict", lambda original: _wrap_load(recorder, original))
    replace(torch.optim.Optimizer, "load_state_dict", lambda original: _wrap_optimizer_load(recorder, original))
    for owner in (torch, torch.random):
        replace(owner, "manual_seed", lambda original: _wrap_seed(recorder, original))
    replace(lr_scheduler.ReduceLROnPlateau, "step", lambda original: _wrap_plateau(recorder, original))


class _Scaling:
    """Whether gradients are multiplied by a loss scale at the moment."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.scaled = False
        self.scale_site = 0

    def wrap_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            self._begin(scaler, outputs, result)
            return result

        return scale

    @contained
    def _begin(self, scaler: Any, outputs: Any, result: Any) -> None:
        if scaler.is_enabled():
            self.scaled, self.scale_site = True, self._recorder.sites.here(2)
            SCALED.update(raw=outputs if isinstance(outputs, torch.Tensor) else None, scaled=result)

    def wrap_unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            self.scaled = False
            return original(scaler, optimizer)

        return unscale_

    def wrap_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: Any, new_scale: Any = None) -> Any:
            self.scaled = False
            SCALED.update(raw=None, scaled=None)
            return original(scaler, new_scale)

        return update


def _wrap_clip(recorder: Recorder, scaling: _Scaling, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(*args: Any, **kwargs: Any) -> Any:
        if scaling.scaled:
            contained(recorder.log.note)(
                "clip-scaled", site=recorder.sites.here(1), call=name, scale_site=scaling.scale_site
            )
        return original(*args, **kwargs)

    return clip


def _wrap_load(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(self: Any, state_dict: Any, strict: bool = True, *args: Any, **kwargs: Any) -> Any:
        site = recorder.sites.here(1)
        result = original(self, state_dict, strict, *args, **kwargs)
        _note_load(recorder, self, state_dict, strict, result, site)
        return result

    return load_state_dict


@contained
def _note_load(recorder: Recorder, module: Any, state: Any, strict: bool, result: Any, site: int) -> None:
    wrapped = WRAPPERS.of_model(module) or WRAPPERS.of_inner(module)
    missing, unexpected = list(result.missing_keys), list(result.unexpected_keys)
    recorder.log.note(
        "load",
        site=site,
        wrapper=wrapped.number if wrapped else None,
        module=type(module).__name__,
        strict=strict,
        keys=len(state),
        own_keys=len(module.state_dict()) if missing else None,
        missing=missing[:5],
        unexpected=unexpected[:5],
        num_missing=len(missing),
        num_unexpected=len(unexpected),
    )


def _wrap_optimizer_load(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        site = recorder.sites.here(1)
        result = original(self, state_dict, *args, **kwargs)
        recorder.log.note("optimizer-load", site=site, entries=len(self.state))
        return result

    return load_state_dict


def _wrap_plateau(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        _note_metric(recorder, metrics)
        return original(self, metrics, *args, **kwargs)

    return step


@contained
def _note_metric(recorder: Recorder, metrics: Any) -> None:
    recorder.log.note("plateau", site=recorder.sites.here(2), value=float(metrics), wrappers=len(WRAPPERS.all))


def _wrap_seed(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def manual_seed(seed: Any) -> Any:
        _note_seed(recorder, seed)
        return original(seed)

    return manual_seed


@contained
def _note_seed(recorder: Recorder, seed: Any) -> None:
    if recorder.num_seeds < 20:  # scripts that seed in every step
        recorder.num_seeds += 1
        recorder.log.note("seeded", site=recorder.sites.here(2), value=int(seed))

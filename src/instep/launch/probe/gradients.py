"""Gradients before each optimizer step: their size over the last steps, and the first that is not a number."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from instep.launch.probe.late_values import LateValues, at_end, can_send
from instep.launch.probe.recorder import Recorder
from instep.launch.probe.wrapping import Wrapped

_SAMPLED = 64
_IN_NUMPY = (torch.float32, torch.float64, torch.float16)
_NEWEST: deque[tuple[int, float]] = deque(maxlen=12)  # step, largest sampled element
_noted: set[int] = set()
_FIRST_STEPS, _LATER_EVERY = 64, 4  # a look costs as much as all else that is watched, on a device five launches
_SHORT_SECONDS = 0.05  # since the last look on the CPU: after the first steps, of shorter ones only some are looked at
_LOOKED = [0.0]
_LATE: list[LateValues] = []


def is_gradient_turn(step: int, now: float) -> bool:
    """Whether to look in this step, counted from 0, which ends at `now`."""
    return step < _FIRST_STEPS or step % (2 * _LATER_EVERY) < 2 or now - _LOOKED[0] >= _SHORT_SECONDS


def look_at_gradients(recorder: Recorder, wrapped: Wrapped, site: int, now: float) -> None:
    """A few elements of one parameter, the first or one in the middle by turns; some microseconds. On a device they are
    read once they have come, since the host would wait."""
    count = len(wrapped.parameters)
    if not count or wrapped.number in _noted:
        return
    index = count // 2 if recorder.num_steps % 2 else 0
    gradient = wrapped.parameters[index].grad
    if gradient is not None and not gradient.is_cpu:
        if recorder.num_steps < _FIRST_STEPS or recorder.num_steps % (2 * _LATER_EVERY) < 2:
            look_later(recorder, wrapped, gradient, index, site)
        return
    _LOOKED[0] = now
    size = _sample(gradient)
    if size is None:
        return
    if math.isfinite(size):
        _NEWEST.append((recorder.num_steps + 1, size))
        return
    _noted.add(wrapped.number)
    recorder.log.note(
        "nonfinite-gradient", wrapper=wrapped.number, site=site, history=newest_sizes(), **_split(wrapped)
    )


def look_later(recorder: Recorder, wrapped: Wrapped, gradient: torch.Tensor, index: int, site: int) -> None:
    """On a device: judges what was sent in steps before, and sends the same of this one."""
    if not can_send(gradient) or gradient.layout is not torch.strided or not gradient.numel():
        return
    if not _LATE:
        _LATE.append(LateValues())
        at_end(lambda: judge_arrived(recorder, _LATE[0]))
    judge_arrived(recorder, _LATE[0])
    flat = gradient.detach()
    flat = flat.reshape(-1) if flat.is_contiguous() else flat[0].reshape(-1)
    _LATE[0].send(flat[:: max(1, flat.numel() // _SAMPLED)].abs().max(), (recorder.num_steps, wrapped, index, site))


def judge_arrived(recorder: Recorder, late: LateValues) -> None:
    for size, (step, wrapped, index, site) in late.arrived():
        if math.isfinite(size):
            _NEWEST.append((step + 1, size))
        elif wrapped.number not in _noted:
            _noted.add(wrapped.number)
            here, recorder.log.step = recorder.log.step, step  # of the step whose gradient it was
            facts = {"bad": [_name_of(wrapped, index)], "good": [], "late": True}
            sizes = [row for row in newest_sizes() if row[0] <= step]
            recorder.log.note("nonfinite-gradient", wrapper=wrapped.number, site=site, history=sizes, **facts)
            recorder.log.step = here


def _name_of(wrapped: Wrapped, index: int) -> str:
    model: Any = wrapped.model()
    rows = model.module.named_parameters() if model is not None else ()
    return next((name for name, p in rows if p is wrapped.parameters[index]), "a parameter")


def newest_sizes() -> list[list[float]]:
    """Of the newest steps the number and the largest sampled element of the gradient."""
    return [[step, float(f"{size:.4g}")] for step, size in _NEWEST]


def _sample(gradient: Any) -> float | None:
    if gradient is None or not gradient.is_cpu or gradient.layout is not torch.strided or not gradient.numel():
        return None
    if gradient.dtype not in _IN_NUMPY:
        return None
    values = gradient.detach().numpy()
    flat = values.reshape(-1) if values.flags.c_contiguous else values[0].reshape(-1)
    sampled = flat[:: max(1, flat.size // _SAMPLED)]
    return max(float(sampled.max()), -float(sampled.min()))  # NaN in either: it is the larger one in numpy


def _split(wrapped: Wrapped) -> dict[str, list[str]]:
    """Parameters whose gradients are bad, and good ones: what made the first bad one lies between them."""
    model: Any = wrapped.model()
    rows: dict[str, list[str]] = {"bad": [], "good": []}
    for name, parameter in model.module.named_parameters() if model is not None else ():
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            rows["good" if bool(torch.isfinite(parameter.grad).all()) else "bad"].append(name)
    return {word: names[:60] for word, names in rows.items()}

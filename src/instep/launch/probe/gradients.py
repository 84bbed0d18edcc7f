"""Gradients before each optimizer step: their size over the last steps, and the first that is not a number."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch

from instep.launch.probe.recorder import Recorder
from instep.launch.probe.wrapping import Wrapped

_SAMPLED = 64
_IN_NUMPY = (torch.float32, torch.float64, torch.float16)
_NEWEST: deque[tuple[int, float]] = deque(maxlen=12)  # step, largest sampled element
_noted: set[int] = set()


def look_at_gradients(recorder: Recorder, wrapped: Wrapped, site: int) -> None:
    """A few elements of one parameter, the first or one in the middle by turns; some microseconds. On the CPU only, since
    elsewhere the host would wait."""
    count = len(wrapped.parameters)
    if not count or wrapped.number in _noted:
        return
    size = _sample(wrapped.parameters[count // 2 if recorder.num_steps % 2 else 0].grad)
    if size is None:
        return
    if math.isfinite(size):
        _NEWEST.append((recorder.num_steps + 1, size))
        return
    _noted.add(wrapped.number)
    recorder.log.note(
        "nonfinite-gradient", wrapper=wrapped.number, site=site, history=newest_sizes(), **_split(wrapped)
    )


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

"""A few numbers made of the parameters, by name, to be compared between ranks afterwards. No collective is involved."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch

from instep.launch.probe.patching import replace
from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.wrapping import WRAPPERS, Wrapped

_SAMPLED = 64  # elements of a parameter that its number is made of
_MOST_NAMES = 400
_FIRST, _DENSE_UNTIL = 4, 1024  # steps: 4, 6, 8, 12, 16, ... 1024, then evenly
_MOST_COST = 0.001  # of the time of a step


class Fingerprints:
    """Decides, equally on all ranks as far as it can, after which steps to look."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.next_step = _FIRST
        self._interval = 512
        self._evals = 0
        self._last = time.monotonic()
        replace(torch.nn.Module, "eval", self._wrap_eval)

    def look(self, step: int) -> None:
        """For each step from `next_step` on."""
        if not self._is_turn(step):
            return
        started = time.monotonic()
        self._note("fingerprint")
        state = torch.get_rng_state().numpy().tobytes()
        self._recorder.log.note("random", print=zlib.crc32(state))
        cost, now = time.monotonic() - started, time.monotonic()
        if step > _DENSE_UNTIL and cost > _MOST_COST * (now - self._last):
            self._interval *= 2
        self._last = now
        self.next_step = next(later for later in count(step + 1) if self._is_turn(later))

    def _is_turn(self, step: int) -> bool:
        return step >= _FIRST and (is_early(step) if step <= _DENSE_UNTIL else step % self._interval == 0)

    def _note(self, name: str) -> None:
        for wrapped in WRAPPERS.all:
            if wrapped.model() is not None:
                self._recorder.log.note(name, wrapper=wrapped.number, values=print_parameters(wrapped))

    @contained
    def final(self) -> None:
        self._note("fingerprint")
        self._note_buffers()

    def _wrap_eval(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def eval(self_: Any) -> Any:
            self._look_at_buffers(self_)
            return original(self_)

        return eval

    @contained
    def _look_at_buffers(self, module: Any) -> None:
        if WRAPPERS.of_model(module) is None and WRAPPERS.of_inner(module) is None:
            return
        self._evals += 1
        if self._evals <= 20 or self._evals % 16 == 0:
            self._note_buffers()

    def _note_buffers(self) -> None:
        for wrapped in WRAPPERS.all:
            model = wrapped.model()
            if model is not None and not model.broadcast_buffers:
                rows, others = print_statistics(model.module), print_buffers(model.module)
                if rows or others:
                    facts = {"values": rows, "others": others}
                    self._recorder.log.note("buffers", wrapper=wrapped.number, evals=self._evals, **facts)


def is_early(step: int) -> bool:
    """Powers of two and the numbers half-way between them."""
    low = 1 << (step.bit_length() - 1)
    return step in (low, low + low // 2)


def print_parameters(wrapped: Wrapped) -> list[float | None]:
    """One number per parameter in the order of its name in the event `wrap`; one transfer from the device in all."""
    return print_tensors(wrapped.parameters[:_MOST_NAMES])


def print_tensors(tensors: Iterable[torch.Tensor]) -> list[float | None]:
    """One number per tensor; one transfer from the device in all."""
    sums = []
    for tensor in tensors:
        flat = tensor.detach()
        if not flat.numel() or flat.layout is not torch.strided:
            sums.append(torch.zeros((), dtype=torch.float64, device=flat.device))
            continue
        flat = flat.reshape(-1) if flat.is_contiguous() else flat[0].reshape(-1)
        sums.append(flat[:: max(1, flat.numel() // _SAMPLED)].double().abs().sum())
    if not sums:
        return []
    values = torch.stack([value.to(sums[0].device) for value in sums]).tolist()
    return [float(f"{value:.9g}") if math.isfinite(value) else None for value in values]


def print_statistics(module: torch.nn.Module) -> dict[str, list[list[float]]]:
    """Running mean and variance of the first channels of the first batch norms."""
    rows: dict[str, list[list[float]]] = {}
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and len(rows) < 8:
            mean, variance = part.running_mean, part.running_var
            if mean is not None and variance is not None:
                rows[name] = [mean[:8].tolist(), variance[:8].tolist()]
    return rows


def print_buffers(module: torch.nn.Module) -> dict[str, float | None]:
    """One number for each of the first buffers of floating point that belong to no batch norm."""
    norms = tuple(
        f"{name}." if name else ""
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
    )
    rows = [
        (name, one) for name, one in module.named_buffers() if one.is_floating_point() and not name.startswith(norms)
    ]
    return dict(zip((name for name, _ in rows[:8]), print_tensors([one for _, one in rows[:8]])))

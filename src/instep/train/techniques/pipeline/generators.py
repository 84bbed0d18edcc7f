"""The states of random generators as bytes that can be sent, so that a stage draws on where the one before stopped."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

TORCH, PYTHON, NUMPY = "torch", "python", "numpy"
_PYTHON_WORDS = 625  # of the Mersenne Twister: 624 and a position
_NONE = (0.0, 0.0)


def find_drawn(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[str, ...]:
    """Which of Python's and numpy's generators moved. before, after: as `seeds.get_generators` gives them."""
    found = [PYTHON] if before[0] != after[0] else []
    if after[2] is not None and (before[2] is None or _numpy_numbers(before[2]) != _numpy_numbers(after[2])):
        found.append(NUMPY)
    return tuple(found)


def read_states(draws: tuple[str, ...], device: torch.device) -> Tensor:
    """Those of the generators named, one after the other, as bytes on the device. They have one length in one process."""
    parts: list[Tensor] = []
    if TORCH in draws:
        parts.append(torch.get_rng_state())
        if device.type == "cuda":
            parts.append(torch.cuda.get_rng_state(device))
    if PYTHON in draws:
        version, words, spare = random.getstate()
        parts.append(_as_bytes([version, *words, *(_NONE if spare is None else (1.0, spare))]))
    if NUMPY in draws:
        parts.append(_as_bytes(_numpy_numbers(sys.modules["numpy"].random.get_state())))
    return torch.cat(parts).to(device)


def write_states(draws: tuple[str, ...], states: Tensor) -> None:
    """As `read_states` gave them."""
    device, states, begin = states.device, states.cpu(), 0

    def take(length: int) -> Tensor:
        nonlocal begin
        begin += length
        return states[begin - length : begin].clone()

    if TORCH in draws:
        torch.set_rng_state(take(torch.get_rng_state().numel()))
        if device.type == "cuda":
            torch.cuda.set_rng_state(take(torch.cuda.get_rng_state(device).numel()), device)
    if PYTHON in draws:
        version, *words, has_spare, spare = _as_numbers(take(8 * (_PYTHON_WORDS + 3)))
        random.setstate((int(version), tuple(map(int, words)), spare if has_spare else None))
    if NUMPY in draws:
        numpy: Any = sys.modules["numpy"]
        *words, position, has_spare, spare = _as_numbers(take(8 * (_PYTHON_WORDS + 2)))
        numpy.random.set_state(("MT19937", numpy.array(words, dtype="uint32"), int(position), int(has_spare), spare))


def _numpy_numbers(state: Any) -> list[float]:
    _, words, position, has_spare, spare = state
    return [*words.tolist(), position, has_spare, spare]


def _as_bytes(numbers: list[float]) -> Tensor:
    """Words of 32 bits are exact in doubles."""
    return torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def _as_numbers(data: Tensor) -> list[float]:
    return data.view(torch.float64).tolist()

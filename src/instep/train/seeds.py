"""Random generators that depend on what is drawn, never on which rank draws it.

Python's, numpy's and torch's global generators are set for a purpose (data of a micro-batch, its forward, or the code
outside) and the numbers that name it. They are set on the generator objects, which costs about a microsecond where
`torch.manual_seed` costs a hundred.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

DATA, FORWARD, OUTSIDE, ORDER = 1, 2, 3, 4
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 64-bit seed from numbers; splitmix64's finaliser over each (Steele, Lea and Flood, OOPSLA 2014)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def set_generators(*numbers: int) -> None:
    """Sets every global generator of this process for (purpose, seed, ...)."""
    seed = mix(*numbers)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def get_generators() -> tuple[Any, ...]:
    """The state of every global generator of this process, for `restore_generators`."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), torch.default_generator.get_state(), numpy and numpy.random.get_state(), cuda


def restore_generators(state: tuple[Any, ...]) -> None:
    python, cpu, numpy_state, cuda = state
    random.setstate(python)
    torch.default_generator.set_state(cpu)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)

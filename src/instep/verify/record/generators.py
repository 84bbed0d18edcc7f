"""The generators that scripts draw from: where they stand, and a stream that depends on a sample alone."""

from __future__ import annotations

import hashlib
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def device_state(device: torch.device) -> str:
    """A hash of where the generator of the device stands."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


def random_state() -> str:
    """Where the generators of Python, numpy and torch stand, together, that of a device in use too."""
    whole = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    whole.update(repr(random.getstate()).encode())
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        _, keys, place, *_ = numpy_random.get_state()
        whole.update(keys.tobytes() + bytes([place % 256, place // 256]))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        whole.update(torch.cuda.get_rng_state().numpy().tobytes())
    return whole.hexdigest()


@contextmanager
def drawing_by(index: Any) -> Iterator[None]:
    """Random numbers inside depend on the index alone; afterwards the generators stand where they stood before."""
    seed = zlib.crc32(repr(index).encode())
    numpy_random = sys.modules.get("numpy.random")
    kept = random.getstate(), torch.get_rng_state(), numpy_random.get_state() if numpy_random else None
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy_random:
        numpy_random.seed(seed)
    try:
        yield
    finally:
        random.setstate(kept[0])
        torch.set_rng_state(kept[1])
        if numpy_random and kept[2] is not None:
            numpy_random.set_state(kept[2])

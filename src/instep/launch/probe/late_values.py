"""Single numbers of a device, read without making the host wait: copied behind the work, looked at once they have come."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from instep.launch.probe.recorder import contained

MOST = 8  # on their way at a time; a host that is further ahead leaves some out


class LateValues:
    """make_buffer: memory of the host that a device can write to by itself; make_event: of torch.cuda's kind."""

    def __init__(
        self,
        make_buffer: Callable[[torch.dtype], torch.Tensor] | None = None,
        make_event: Callable[[], Any] = torch.cuda.Event,
    ) -> None:
        self._make_buffer = make_buffer or _pinned
        self._make_event = make_event
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        self._events: list[Any] = []
        self._sent = 0
        self._on_way: deque[tuple[Any, torch.Tensor, Any]] = deque()

    def __len__(self) -> int:
        return len(self._on_way)

    def send(self, value: torch.Tensor, what: Any) -> bool:
        """Starts the copy of one number; what: comes back with it. False when too many are on their way."""
        if len(self._on_way) >= MOST:
            return False
        slots = self._buffers.get(value.dtype)
        if slots is None:
            slots = self._buffers[value.dtype] = self._make_buffer(value.dtype).unbind()
        if not self._events:
            self._events = [self._make_event() for _ in range(MOST)]
        slot, event = slots[self._sent % MOST], self._events[self._sent % MOST]
        slot.copy_(value.detach().reshape(()), non_blocking=True)
        event.record()
        self._sent += 1
        self._on_way.append((event, slot, what))
        return True

    def arrived(self) -> Iterator[tuple[float, Any]]:
        """Numbers that have come since the last look, in the order in which they were sent."""
        while self._on_way and self._on_way[0][0].query():
            _, slot, what = self._on_way.popleft()
            yield slot.item(), what


def can_send(value: Any) -> bool:
    """Whether a number lies on the current device and may be copied now: not while a CUDA graph is being captured. Of
    tensors whose operations mean communication none is sent."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.is_cuda
        and value.is_floating_point()
        and value.device.index == torch.cuda.current_device()
        and not torch.cuda.is_current_stream_capturing()
    )


def at_end(look: Callable[[], None]) -> None:
    """Looks once more before the rank ends: at the numbers of its last steps."""
    atexit.register(contained(look))


def _pinned(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(MOST, dtype=dtype, pin_memory=True)

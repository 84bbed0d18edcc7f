"""What a rank's memory is made of: parameters, gradients, state of optimizers, and the rest at its highest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from instep.launch.probe.recorder import Recorder, contained
from instep.launch.probe.wrapping import WRAPPERS

_STEPS = (2, 32)  # state of the optimizer is there after the first step
_MOST_NODES = 1500


@contained
def note_memory_kinds(recorder: Recorder, optimizer: Any) -> None:
    """Bytes by kind after a few steps. Looks at names and sizes only."""
    if recorder.num_steps not in _STEPS:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]
    state = [value for row in optimizer.state.values() for value in _tensors_of(row)]
    recorder.log.note(
        "memory-kinds",
        optimizer=type(optimizer).__name__,
        parameters=sum(_bytes(p) for p in parameters),
        gradients=sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        optimizer_state=sum(_bytes(value) for value in state),
        peak=read_peak_bytes(),
        device=str(parameters[0].device) if parameters else "cpu",
    )


def _tensors_of(row: Any) -> Iterator[torch.Tensor]:
    if isinstance(row, dict):
        yield from (value for value in row.values() if isinstance(value, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor only this rank's part is here
    return local.numel() * local.element_size()


def read_peak_bytes() -> int:
    """The most that was used so far: of the device where one is in use, of the process otherwise."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status", encoding="ascii") as file:
        row = next((line for line in file if line.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(row.split()[1]) << 10


def graph_bytes(output: torch.Tensor) -> int:
    """Bytes that the graph of an output keeps for a backward, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for wrapped in WRAPPERS.all for p in wrapped.parameters}
    storages: dict[int, int] = {}
    seen: set[Any] = set()
    queue = [output.grad_fn]
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in _saved_tensors(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
        queue += [parent for parent, _ in node.next_functions]
    return sum(storages.values())


def _saved_tensors(node: Any) -> Iterator[torch.Tensor]:
    for key in dir(node):
        if key.startswith("_saved_"):
            try:
                value = getattr(node, key)
            except RuntimeError:
                continue
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                yield value

"""Local SGD: each rank trains a copy by itself, and every k steps all take the mean of their parameters.

Before whatever is seen from outside (a save, an export, an evaluation, the end of the loop) the mean is taken as well.
Optimizer state stays each rank's own, but for a save: a checkpoint holds the mean, and all go on from it, so that a run
that continues from it does what this one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.errors import UsageError
from instep.train.arguments import Arguments
from instep.train.reduce.local_reducer import LocalReducer
from instep.train.update import Trained

if TYPE_CHECKING:
    from instep.train.run import Run

CHUNK_BYTES = 4 << 20


def check_local_sgd(arguments: Arguments) -> None:
    """Raises UsageError for arguments of Run that have no meaning where no gradient is sent."""
    for name in ("exact", "compress"):
        if value := getattr(arguments, name):
            raise UsageError(
                f"{name}={value!r} is about how gradients are added up over ranks, and with Parallel(average_every=...) none "
                "are. Leave one of them out."
            )


def average_when_due(run: Run, index: int) -> None:
    """After step `index`. Every rank must call it."""
    for trained in run._trained:
        if isinstance(trained.reducer, LocalReducer) and (index + 1) % trained.reducer.every == 0:
            _average_parameters(trained, f"the average after step {index}")


def average_all(run: Run, what: str, *, state: bool = False) -> None:
    """Makes equal on all ranks what may differ; with `state` the optimizers' too. Every rank must call it."""
    for trained in run._trained:
        if isinstance(trained.reducer, LocalReducer):
            _average_parameters(trained, what)
            if state:
                _average_state(trained, what)


def _average_parameters(trained: Trained, what: str) -> None:
    reducer = trained.reducer
    assert isinstance(reducer, LocalReducer)
    if reducer.parameters_apart:
        average([parameter.detach() for parameter in trained.parameters()], reducer, what)
        reducer.parameters_apart = False


def _average_state(trained: Trained, what: str) -> None:
    """Means of all tensors but counts of steps, of which all take the largest; a rank without state adds zeros."""
    reducer = trained.reducer
    assert isinstance(reducer, LocalReducer)
    if not reducer.state_apart:
        return
    states = [trained.optimizer.state[parameter] for parameter in trained.parameters()]
    counts, moments = _agree_on_state(states, reducer, what)
    average(moments, reducer, what)
    if counts:
        row = torch.stack([count.detach().double().cpu() for count in counts])
        if reducer.ranks.size > 1:
            handle = dist.all_reduce(row, op=dist.ReduceOp.MAX, group=reducer.ranks.host_group, async_op=True)
            reducer.ranks.wait(handle, what)
        for count, value in zip(counts, row):
            count.copy_(value)
    reducer.state_apart = False


def _agree_on_state(
    states: Sequence[dict[str, Any]], reducer: LocalReducer, what: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Gives every rank the tensors that any has; the counts of steps among them, and the others, in one order."""
    mine = [{key: _describe(value) for key, value in state.items()} for state in states]
    counts: list[Tensor] = []
    moments: list[Tensor] = []
    for state, parameter, everyone in zip(states, reducer.parameters, zip(*reducer.ranks.gather_objects(mine, what))):
        wanted = {key: described for one in everyone for key, described in one.items() if described is not None}
        for key in sorted(wanted):
            shape, dtype, on_host = wanted[key]
            if not isinstance(state.get(key), Tensor):
                state[key] = torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
            if key == "step":
                counts.append(state[key])
            elif state[key].is_floating_point():
                moments.append(state[key])
    return counts, moments


def _describe(value: Any) -> tuple[Any, ...] | None:
    return (tuple(value.shape), value.dtype, value.device.type == "cpu") if isinstance(value, Tensor) else None


def average(tensors: Sequence[Tensor], reducer: LocalReducer, what: str) -> None:
    """In place: the mean over ranks, the same bits on all. Every rank must call it with the same tensors."""
    size = reducer.ranks.size
    if size == 1:
        return
    sent: list[tuple[Any, Tensor, list[Tensor]]] = []
    for parts in _chunks(tensors):
        flat = torch.cat([part.reshape(-1) for part in parts])
        flat = flat.float() if flat.element_size() < 4 else flat  # sums of 16-bit numbers overflow and round
        sent.append((dist.all_reduce(flat, group=reducer.group, async_op=True), flat, parts))
    for handle, flat, parts in sent:
        reducer.ranks.wait(handle, what)
        for part, mean in zip(parts, flat.div_(size).split([part.numel() for part in parts])):
            part.copy_(mean.view(part.shape))


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """A few megabytes each, of one type on one device."""
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        chunk: list[Tensor] = []
        for tensor in tensors:
            if (tensor.dtype, tensor.device) == kind:
                chunk.append(tensor)
                if sum(part.numel() * part.element_size() for part in chunk) >= CHUNK_BYTES:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk

"""Rows of the whole global batch, for losses that compare all samples with all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.errors import UsageError
from instep.train import seeds
from instep.train.data.loader import MicroBatch, StepBatches

if TYPE_CHECKING:
    from instep.train.run import Run
    from instep.train.step import Step


def gather_rows(run: Run, step: Step, fn: Callable[..., Any], batches: StepBatches | Sequence[MicroBatch]) -> Any:
    """The rows of all ranks, with a backward that re-runs fn on this rank's micro-batches."""
    number = step._pass

    def rows_of(batch: MicroBatch) -> tuple[Tensor, ...]:
        step._current = batch
        seeds.set_generators(seeds.FORWARD, run._seed, step.index, number, batch.slot)
        run._buffers.begin(batch.slot)
        return _as_tuple(_call(fn, batch.data))

    is_tuple = False
    local: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for batch in batches:
            step._current = batch
            seeds.set_generators(seeds.FORWARD, run._seed, step.index, number, batch.slot)
            run._buffers.begin(batch.slot)
            result = _call(fn, batch.data)
            is_tuple = isinstance(result, tuple)
            local.append(_as_tuple(result))
            run._buffers.end()
    counts = [rows[0].shape[0] for rows in local]
    parts = [torch.cat(column) for column in zip(*local)]
    everyone = run._grid.data.gather_objects(
        (is_tuple, [(p.shape, p.dtype) for p in parts]), f"step.all_rows of step {step.index}"
    )
    start = sum(shapes[0][0][0] for _, shapes in everyone[: run._grid.data.rank] if shapes)
    whole = [_gather(run, parts, everyone, column) for column in range(max(len(shapes) for _, shapes in everyone))]

    def run_again(gradients: Sequence[Tensor | None]) -> None:
        offset = start
        for batch, count in zip(batches, counts):
            with torch.enable_grad():
                rows = rows_of(batch)
            run._buffers.discard()
            pairs = [
                (row, gradient[offset : offset + count] * run._grid.data.size)
                for row, gradient in zip(rows, gradients)
                if gradient is not None and row.requires_grad
            ]
            if pairs:
                torch.autograd.backward([row for row, _ in pairs], [gradient for _, gradient in pairs])
            offset += count
        step._current = None

    results = _AllRows.apply(run_again, torch.zeros((), requires_grad=True), *whole)
    return results if any(flag for flag, _ in everyone) else results[0]


class _AllRows(torch.autograd.Function):
    """Identity in forward; backward hands the gradients of all rows to `run_again`, which reaches the parameters.

    The gradient is multiplied by the number of ranks, since each rank adds only its own rows' share to a sum that is
    then averaged over ranks. `_anchor` makes autograd come here although the rows themselves have no graph.
    """

    @staticmethod
    def forward(ctx: Any, run_again: Any, _anchor: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.run_again = run_again
        return tuple(row.view_as(row) for row in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        ctx.run_again(gradients)
        return (None, None, *(None for _ in gradients))


def _gather(run: Run, parts: list[Tensor], everyone: list[tuple[bool, list[Any]]], column: int) -> Tensor:
    pieces, handles = [], []
    for rank, (_, shapes) in enumerate(everyone):
        if not shapes:
            continue
        shape, dtype = shapes[column]
        piece = (
            parts[column]
            if rank == run._grid.data.rank
            else torch.empty(shape, dtype=dtype, device=run._grid.data.device)
        )
        pieces.append(piece.contiguous())
        if run._grid.data.size > 1:
            handles.append(dist.broadcast(pieces[-1], group_src=rank, group=run._data_group, async_op=True))
    for handle in handles:
        run._grid.data.wait(handle, "step.all_rows")
    return torch.cat(pieces)


def _as_tuple(rows: Any) -> tuple[Tensor, ...]:
    found = rows if isinstance(rows, tuple) else (rows,)
    for part in found:
        if not isinstance(part, Tensor) or part.dim() == 0:
            raise UsageError(
                f"step.all_rows(fn): fn returned {type(part).__name__ if not isinstance(part, Tensor) else 'a scalar'}; "
                "it has to return a tensor of shape (samples, ...), or a tuple of such."
            )
    return found


def _call(fn: Callable[..., Any], data: Any) -> Any:
    """Calls fn with the micro-batch, unpacked when fn takes several arguments."""
    if isinstance(data, (tuple, list)) and _takes(fn) == len(data) and len(data) > 1:
        return fn(*data)
    return fn(data)


def _takes(fn: Callable[..., Any]) -> int:
    """How many positional arguments fn needs; as many as there are for *args."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    parameters = list(inspect.signature(target).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed)

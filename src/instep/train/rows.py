"""Rows of the whole global batch, for losses that compare all samples with all.

The rows of this rank's micro-batches are made without a graph and sent to all ranks. When backward has come to the rows,
the function runs again per micro-batch, with the same random numbers, and hands its rows' gradients on to the parameters
(Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.errors import RanksDisagree, UsageError
from instep.train import seeds
from instep.train.call_arguments import show
from instep.train.call_site import user_call_site
from instep.train.data.loader import MicroBatch

if TYPE_CHECKING:
    from instep.train.run import Run
    from instep.train.step import Step

Shapes = list[tuple[torch.Size, torch.dtype]]  # one per column of rows; empty on a rank without a micro-batch


class AllRows:
    """One call of step.all_rows.

    has_first: whether this rank is the first that has rows; num_samples: of the global batch; anchor: a leaf that makes
    autograd come here although the rows have no graph; gradients: of all rows, once backward has come to them.
    """

    def __init__(self, run: Run, step: Step, fn: Callable[..., Any]) -> None:
        self._run, self._step, self._fn = run, step, fn
        self._number = step._pass
        self._counts: list[int] = []  # rows of each micro-batch of this rank
        self._gives_tuple = False
        self._start = 0  # the first row of this rank among all
        self.has_first = False
        self.num_samples = 0
        self.anchor = torch.zeros((), requires_grad=True)
        self.gradients: Sequence[Tensor | None] | None = None
        self._was_sent = False

    def gather(self, batches: Iterable[MicroBatch]) -> Any:
        """fn's rows of all ranks, in sample order. Every rank must call it."""
        data = self._run._grid.data
        local: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for batch in batches:
                local.append(self.run_fn(batch))
                self._run._buffers.end()
        self._counts = [rows[0].shape[0] for rows in local]
        parts = [torch.cat(column) for column in zip(*local)]
        shapes = [(part.shape, part.dtype) for part in parts]
        mine = self._gives_tuple, sum(batch.num_samples for batch in batches), shapes
        flags, samples, everyone = zip(*data.gather_objects(mine, f"step.all_rows of step {self._step.index}"))
        columns = _check_shapes(everyone)
        self.num_samples = sum(samples)
        self._start = sum(theirs[0][0][0] for theirs in everyone[: data.rank] if theirs)
        self.has_first = bool(shapes) and not any(everyone[: data.rank])
        whole = [self._gather_column(parts, everyone, column) for column in range(columns)]
        results = _Rows.apply(self.take, self.anchor, *whole)
        return results if any(flags) else results[0]

    def take(self, gradients: Sequence[Tensor | None]) -> None:
        """Backward came to the rows; the micro-batches follow when it is through (`backward_rows`)."""
        if not self._step.in_backward:
            self._step.stray = self._step.stray or user_call_site()
        elif self._run._exact and (self._was_sent or self._step._current is not None):
            raise UsageError(
                "exact=True takes one step.backward for the rows of a step.all_rows, outside the inner loop: add the losses "
                "up, and call it once."
            )
        else:
            self.gradients = gradients

    def pairs(self, position: int, batch: MicroBatch, factor: float) -> list[tuple[Tensor, Tensor]]:
        """The rows of a micro-batch, made again with a graph, and their gradients times `factor`."""
        with torch.enable_grad():
            rows = self.run_fn(batch)
        self._run._buffers.discard()
        return self.pair(position, rows, factor)

    def pair(self, position: int, rows: Sequence[Tensor], factor: float) -> list[tuple[Tensor, Tensor]]:
        """Those of the rows that have a graph, with their gradients times `factor`."""
        assert self.gradients is not None
        begin = self._start + sum(self._counts[:position])
        end = begin + self._counts[position]
        given = [(row, gradient) for row, gradient in zip(rows, self.gradients) if gradient is not None]
        return [(row, gradient[begin:end] * factor) for row, gradient in given if row.requires_grad]

    def end_backward(self) -> None:
        self.gradients, self._was_sent = None, True
        self._step._current = None

    def run_fn(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """The rows of a micro-batch, with its random numbers."""
        self._step._current = batch
        seeds.set_generators(seeds.FORWARD, self._run._seed, self._step.index, self._number, batch.slot)
        self._run._buffers.begin(batch.slot)
        return self.make(batch.data)

    def make(self, data: Any) -> tuple[Tensor, ...]:
        rows = call_fn(self._fn, data)
        self._gives_tuple |= isinstance(rows, tuple)
        return _as_tuple(rows)

    def _gather_column(self, parts: list[Tensor], everyone: Sequence[Shapes], column: int) -> Tensor:
        data = self._run._grid.data
        pieces, handles = [], []
        for rank, shapes in enumerate(everyone):
            if not shapes:
                continue
            shape, dtype = shapes[column]
            own = rank == data.rank
            pieces.append(parts[column].contiguous() if own else torch.empty(shape, dtype=dtype, device=data.device))
            if data.size > 1:
                group = self._run._data_group
                handles.append(dist.broadcast(pieces[-1], group_src=rank, group=group, async_op=True))
        for handle in handles:
            data.wait(handle, "step.all_rows")
        return torch.cat(pieces)


class _Rows(torch.autograd.Function):
    """Identity in forward; backward hands the gradients of all rows to `take`."""

    @staticmethod
    def forward(ctx: Any, take: Any, _anchor: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.take = take
        return tuple(row.view_as(row) for row in rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        ctx.take(gradients)
        return (None, None, *(None for _ in gradients))


def backward_rows(
    run: Run,
    calls: Sequence[AllRows],
    batches: Iterable[MicroBatch],
    factor: float,
    inputs: Sequence[Tensor] | None,
    around: Callable[[int, MicroBatch], AbstractContextManager[None]],
) -> None:
    """After the backward of a loss over rows: sends what came to them on to the parameters, micro-batch by micro-batch.

    calls: all of this step; around: is entered for each micro-batch with its place among this rank's; inputs: as
    torch.autograd.backward takes them.
    """
    waiting = [call for call in calls if call.gradients is not None]
    with statistics_kept(run):
        for position, batch in enumerate(batches if waiting else ()):
            pairs = [pair for call in waiting for pair in call.pairs(position, batch, factor)]
            with around(position, batch):
                if pairs:
                    rows, gradients = zip(*pairs)
                    torch.autograd.backward(rows, gradients, inputs=inputs)
    for call in waiting:
        call.end_backward()


@contextmanager
def statistics_kept(run: Run) -> Iterator[None]:
    """A micro-batch that runs again must not count twice in running statistics, which `Buffers` sees to where it is on."""
    kept = [] if run._buffers.is_active else [(b, b.clone()) for model in run._models for b in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)


def _check_shapes(everyone: Sequence[Shapes]) -> int:
    """The number of columns. Raises RanksDisagree for rows that cannot lie in one tensor."""
    kinds = [[(shape[1:], dtype) for shape, dtype in shapes] for shapes in everyone if shapes]
    first = kinds[0]
    for shapes in everyone:
        if shapes and [(shape[1:], dtype) for shape, dtype in shapes] != first:
            listed = [[f"{tuple(shape)} {dtype}".replace("torch.", "") for shape, dtype in each] for each in everyone]
            described = "; ".join(f"rank {rank} {', '.join(each)}" for rank, each in enumerate(listed) if each)
            raise RanksDisagree(f"step.all_rows(fn): fn's rows differ in more than their number: {described}.")
    return len(first)


def _as_tuple(rows: Any) -> tuple[Tensor, ...]:
    found = rows if isinstance(rows, tuple) else (rows,)
    for part in found:
        if not isinstance(part, Tensor) or part.dim() == 0:
            raise UsageError(
                f"step.all_rows(fn): fn returned {show(part)}; it has to return a tensor of shape (samples, ...), or a tuple "
                "of such."
            )
    if len({part.shape[0] for part in found}) != 1:
        counts = ", ".join(str(part.shape[0]) for part in found) or "nothing"
        raise UsageError(f"step.all_rows(fn): fn returned {counts} rows; all its tensors have to have equally many.")
    return found


def call_fn(fn: Callable[..., Any], data: Any) -> Any:
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

"""Gradients sent as products of two thin matrices (PowerSGD: Vogels, Karimireddy and Jaggi, NeurIPS 2019).

A gradient matrix M (n x m) of a rank becomes P = M Q, summed over ranks and made orthonormal, and Q = M' P, summed
over ranks; P Q' stands for the sum of all M. What that leaves out stays in this rank's memory and is added to its next
gradient, so nothing is lost for good; Q is kept as the start of the next step. Vectors, small matrices and the control
words go along uncompressed, in the same all-reduce as the P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.errors import UsageError
from instep.train.reduce.bucket import Bucket, Handle, plain_zeros
from instep.train.reduce.courier import Couriers
from instep.train.seeds import mix

WORTH_IT = 2  # a matrix is compressed when its two factors have at most 1/2 of its numbers
UNCOMPRESSED_STEPS = 10  # the first gradients change fast and have no Q to start from


@dataclass
class Memory:
    """Of one bucket. errors, factors (the Q): per compressed matrix; steps: how often the bucket was summed."""

    errors: list[Tensor]
    factors: list[Tensor]
    steps: int = 0

    def snapshot(self) -> dict[str, Any]:
        return {
            "errors": [*self.errors],
            "factors": [*self.factors],
            "steps": self.steps,
        }  # tensors are never written to


class PowerSGD:
    """rank: columns of the thin matrices. group: one in which nothing else is sent while buckets are under way.

    Keeps one more number per number of the compressed gradients. Ranks get the same bits as long as their processors
    are of one kind, since each multiplies the same two matrices.
    """

    allocate = staticmethod(plain_zeros)

    def __init__(
        self, group: dist.ProcessGroup, rank: int = 4, *, uncompressed_steps: int = UNCOMPRESSED_STEPS, seed: int = 0
    ) -> None:
        if rank < 1:
            raise UsageError(f"PowerSGD(rank={rank}) has to be a whole number of at least 1.")
        self.rank, self.uncompressed_steps, self.seed = rank, uncompressed_steps, seed
        self._memories: dict[int, Memory] = {}
        self._loaded: dict[int, Memory] = {}
        self._couriers = Couriers(self._sum, (group,))

    def start(self, bucket: Bucket) -> Handle:
        return self._couriers.start(bucket)

    def close(self) -> None:
        self._couriers.close()

    def state(self) -> dict[str, Any]:
        """What this rank remembers, for a checkpoint; taken when no bucket is under way, and never changed later."""
        memories = {**self._loaded, **self._memories}
        return {"buckets": {index: memory.snapshot() for index, memory in memories.items()}}

    def load_state(self, first: dict[str, Any], mine: Sequence[dict[str, Any]]) -> None:
        """first: `state()` of rank 0; mine: those of the ranks r that were saved with r % ranks = this rank.

        So their number may differ from ours and nothing that was left out is lost. The memory of a bucket that has
        other matrices now begins anew.
        """
        self._memories.clear()
        self._loaded = {index: Memory(**saved) for index, saved in first["buckets"].items()}
        for index, memory in self._loaded.items():
            saved = [state["buckets"][index]["errors"] for state in mine]
            memory.errors = [
                sum((errors[i] for errors in saved), torch.zeros_like(error)) for i, error in enumerate(memory.errors)
            ]

    def rescale(self, factor: float) -> None:
        for memory in (*self._memories.values(), *self._loaded.values()):
            memory.errors = [error * factor for error in memory.errors]

    @torch.no_grad()
    def _sum(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        if not bucket.views:  # a second helping, which has no memory
            dist.all_reduce(bucket.flat, group=group)
            return
        memory = self._memory_of(bucket)
        memory.steps += 1
        if memory.steps <= self.uncompressed_steps or not memory.factors:
            dist.all_reduce(bucket.flat, group=group)
        else:
            self._sum_compressed(bucket, memory, group)

    def _memory_of(self, bucket: Bucket) -> Memory:
        memory = self._memories.get(bucket.index)
        if memory is not None:
            return memory
        shapes = [tuple(matrix.shape) for matrix in matrices_of(bucket, self.rank)]
        memory, loaded = self._new_memory(bucket, shapes), self._loaded.pop(bucket.index, None)
        if loaded is not None and _shapes(loaded) == _shapes(memory):
            memory.steps = loaded.steps
            for ours, theirs in zip(memory.errors + memory.factors, loaded.errors + loaded.factors):
                ours.copy_(theirs)
        self._memories[bucket.index] = memory
        return memory

    def _new_memory(self, bucket: Bucket, shapes: list[tuple[int, ...]]) -> Memory:
        generator = torch.Generator().manual_seed(mix(self.seed, bucket.index))
        like: dict[str, Any] = {"dtype": _wide(bucket.flat.dtype), "device": bucket.flat.device}
        errors = [torch.zeros(shape, **like) for shape in shapes]
        starts = [torch.randn(shape[1], min(self.rank, *shape), generator=generator) for shape in shapes]
        return Memory(errors, [start.to(**like) for start in starts])

    def _sum_compressed(self, bucket: Bucket, memory: Memory, group: dist.ProcessGroup) -> None:
        windows = matrices_of(bucket, self.rank)
        wholes = [window.to(error.dtype) + error for window, error in zip(windows, memory.errors)]
        rest = rest_of(bucket, windows)
        left = [whole @ factor for whole, factor in zip(wholes, memory.factors)]
        *left, plain = self._all_reduce([*left, *(part.to(_wide(part.dtype)) for part in rest)], len(left), group)
        for part, summed in zip(rest, plain):
            part.copy_(summed)
        left = [torch.linalg.qr(columns).Q for columns in left]
        *right, _ = self._all_reduce([whole.T @ columns for whole, columns in zip(wholes, left)], len(left), group)
        for i, window in enumerate(windows):
            approximation = left[i] @ right[i].T
            window.copy_(approximation)
            # after a step that is not finite, and is skipped by all, memory stays as it was
            finite = torch.isfinite(right[i]).all()
            error = wholes[i].sub_(approximation, alpha=1 / group.size())
            memory.errors[i] = torch.where(finite, error, memory.errors[i])
            memory.factors[i] = torch.where(
                finite, right[i] / right[i].abs().amax().clamp(min=1e-30), memory.factors[i]
            )

    def _all_reduce(self, tensors: list[Tensor], num_named: int, group: dist.ProcessGroup) -> list[Any]:
        """One all-reduce of all; the first `num_named` come back one by one, the others as a list at the end."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        summed = [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
        return [*summed[:num_named], summed[num_named:]]


def matrices_of(bucket: Bucket, rank: int) -> list[Tensor]:
    """The windows on the bucket, as matrices, that are worth compressing."""
    matrices = [as_matrix(view) for view in bucket.views]
    return [m for m in matrices if m is not None and sum(m.shape) * rank * WORTH_IT <= m.numel()]


def as_matrix(view: Tensor) -> Tensor | None:
    """A 2-dim view of the same memory, rows along the dim of the largest stride; None for vectors."""
    order = sorted(range(view.dim()), key=lambda dim: view.stride(dim), reverse=True)
    sorted_view = view.permute(order)
    if view.dim() < 2 or not sorted_view.is_contiguous():
        return None
    return sorted_view.flatten(1)


def rest_of(bucket: Bucket, windows: Sequence[Tensor]) -> list[Tensor]:
    """What of `bucket.flat` lies outside of the windows, in one piece where it can be."""
    start = bucket.flat.storage_offset()
    taken = sorted((window.storage_offset() - start, window.numel()) for window in windows)
    pieces, end = [], 0
    for offset, numel in [*taken, (bucket.flat.numel(), 0)]:
        if offset > end:
            pieces.append(bucket.flat[end:offset])
        end = offset + numel
    return pieces


def _shapes(memory: Memory) -> list[torch.Size]:
    return [tensor.shape for tensor in memory.errors + memory.factors]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32

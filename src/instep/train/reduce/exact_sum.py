"""Sums over ranks in the tree of `slot_tree`, for ranks that share no memory: as many bytes as a ring all-reduce.

A bucket is cut into one shard per rank. Each rank gets all ranks' pieces of its shard, adds them in tree order, and
sends the sum to all. Two ranks need nothing of that: a + b has the bits of b + a, so any all-reduce is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from instep.train.reduce.bucket import Bucket, Handle, forget_nothing, plain_zeros
from instep.train.reduce.compress import CompressedSum
from instep.train.reduce.courier import Couriers
from instep.train.reduce.gather_rows import gather_rows
from instep.train.reduce.group_sum import GroupSum
from instep.train.reduce.shared_memory import add_in_tree

WIDE = (torch.float32, torch.float64)  # added as they are; narrower ones are added as fp32


class ExactSum:
    """groups: of the same ranks; nothing else is sent in them while buckets are under way. The first is for pairs."""

    allocate = staticmethod(plain_zeros)
    rescale = staticmethod(forget_nothing)

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._is_pair = groups[0].size() == 2
        self._pair_sum = GroupSum(groups[0])
        self._couriers = Couriers(self._sum, groups[1:] if self._is_pair else groups)

    def start(self, bucket: Bucket) -> Handle:
        commutes = self._is_pair and bucket.flat.dtype in WIDE
        return self._pair_sum.start(bucket) if commutes else self._couriers.start(bucket)

    def close(self) -> None:
        self._couriers.close()

    @torch.no_grad()
    def _sum(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        flat, size = bucket.flat, group.size()
        width = -(-flat.numel() // size)
        sent = flat if flat.numel() == size * width else torch.cat([flat, flat.new_zeros(size * width - flat.numel())])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        mine = add_in_tree(list(received.view(size, width))).to(flat.dtype)
        gather_rows(received.view(size, width), mine, group)
        flat.copy_(received[: flat.numel()])


class ExactCompressedSum(CompressedSum):
    """Sends 16-bit numbers and adds them as fp32 in tree order, each node's sum rounded to 16 bits.

    A rank's own part of the tree is rounded at each node as well (`ExactReducer`), so it does not show which sums were
    sent. The error grows with the depth of the tree, log2 of the number of slots, not with their number.
    """

    def add_gradients(self, rows: Tensor) -> Tensor:
        parts = list(rows)
        while len(parts) > 1:
            pairs = [round_to(one + other, self.dtype) for one, other in zip(parts[::2], parts[1::2])]
            parts = pairs + parts[2 * len(pairs) :]
        return parts[0]


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value with the digits of a narrower type, in its own type."""
    return value.to(dtype).to(value.dtype)

"""The reducer of `exact=True`: gradients are added in one fixed binary tree over slots, so N does not show in the bits.

A rank holds a run of slots that is a subtree (`slot_tree`). It adds its slots in tree order as they come, keeping the
roots of complete subtrees: at most log2(slots per rank) copies of the gradients. The last slot's gradients meet them
bucket by bucket, and the transport adds the ranks' sums, the upper levels of the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instep.errors import UsageError
from instep.train.reduce.bucket import Bucket, Transport
from instep.train.reduce.exact_sum import round_to
from instep.train.reduce.lanes import Lanes
from instep.train.reduce.reducer import Reducer
from instep.train.reduce.slot_tree import SlotTree, carries
from instep.train.reduce.words import Table
from instep.train.world import World

ABSENT = -0.0  # x + -0.0 is x, bit for bit; x + 0.0 is not where x is -0.0


@dataclass
class Node:
    """The sum of a complete subtree, by parameter. filled: which parameters have a gradient in it."""

    views: list[Tensor]
    filled: bytearray


class ExactReducer(Reducer):
    """num_slots: of this rank in a full step; a power of two, or any number on one process. rounding: each gradient of
    a slot and each sum is rounded to this type, which is what ranks send each other then."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        world: World,
        transport: Transport,
        num_slots: int,
        rounding: torch.dtype | None,
    ) -> None:
        self.num_positions = num_slots
        self._rounding = rounding
        self._nodes: dict[int, Node] = {}  # by level: complete left subtrees
        self._free: list[Node] = []
        self._scratch: dict[int, Bucket] = {}
        self._leaf: Node | None = None  # where the present slot's gradients go
        self._position = -1
        self._waits = False  # for an update of gradients of an earlier pass
        super().__init__(parameters, world, transport)

    def _adopt(self) -> None:
        super()._adopt()
        self.lanes = Lanes(self.parameters, lambda: SlotTree(self._rounded))
        self._direct, self._built = False, True
        self._nodes, self._free, self._scratch = {}, [], {}
        # The layout may not depend on which rank saw which gradient first.
        self._expected = [int(wanted) for wanted in self._trained]
        self._allocate([i for i in reversed(range(len(self.parameters))) if self._trained[i]])
        for parameter in self.parameters:
            parameter.grad = None

    # -- one slot after the other

    def begin_pass(self, overlap: bool) -> None:
        super().begin_pass(overlap)
        self._waits = bool(self._used.any())

    def begin_micro_batch(self, position: int, last: bool) -> None:
        self._end_slot()
        super().begin_micro_batch(position, last)
        self._arrivals = [0] * len(self.parameters)
        self._position = position
        self._leaf = self._nodes.pop(0, None) if position & 1 and not last else None

    def enter_backward(self) -> None:
        if self._waits:
            raise UsageError(
                "exact=True adds up the micro-batches of one pass per update: call step.update() before the step is "
                "iterated again, or leave exact out."
            )
        super().enter_backward()

    def has_lost_gradients(self) -> bool:
        """Never: a slot's gradients are taken out of the parameters as they come."""
        return False

    def _accept(self, i: int, parameter: Tensor) -> bool:
        gradient = parameter.grad
        assert gradient is not None
        if self._arrivals[i]:
            raise UsageError(
                f"exact=True: a parameter of shape {tuple(parameter.shape)} got its gradient in several pieces within one "
                "backward, which adds them in another order than one process would. Where activation checkpointing is "
                "used, pass use_reentrant=False."
            )
        if gradient.is_sparse:
            raise UsageError("exact=True takes no sparse gradients: make the embedding with sparse=False.")
        parameter.grad = None  # the next slot's gradient comes as a tensor of its own
        if self._last_micro_batch:
            self._put(self._view(i), self._filled, i, gradient)
        else:
            self._leaf = self._leaf or self._new_node()
            self._put(self._leaf.views[i], self._leaf.filled, i, self._rounded(gradient))
        return True

    def _end_slot(self) -> None:
        """Joins the slot that was under way with the subtrees that it completes. The last one's wait for `_complete`."""
        if self._position < 0 or self._last_micro_batch:
            return
        node, self._leaf = self._leaf, None
        for level in range(carries(self._position)):
            left = self._nodes.pop(level, None)
            if left is not None and node is not None:
                for i, view in enumerate(node.views):
                    if node.filled[i]:
                        self._put(left.views[i], left.filled, i, view)
                self._free.append(node)
            node = left if left is not None else node
        if node is not None:
            self._nodes[carries(self._position)] = node
        self._position = -1

    def _new_node(self) -> Node:
        if self._free:
            node = self._free.pop()
            node.filled = bytearray(len(self.parameters))
            return node
        views: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        for bucket in self.buckets:
            flat = torch.empty_like(bucket.gradients)
            for i, view in self._windows(flat, bucket.index):
                views[i] = view
        return Node(views, bytearray(len(self.parameters)))

    def _complete(self, bucket: Bucket) -> None:
        """Adds the left subtrees, the nearest first, and marks what no slot has as absent."""
        for i in self._members[bucket.index]:
            view = self._view(i)
            for level in sorted(self._nodes):
                node = self._nodes[level]
                if node.filled[i]:
                    self._put(view, self._filled, i, node.views[i])
            if not self._filled[i]:
                view.fill_(ABSENT)

    def _put(self, target: Tensor, filled: bytearray, i: int, value: Tensor) -> None:
        """Adds to what is there, or is the first."""
        if filled[i]:
            target.add_(value)
        else:
            target.copy_(value)
            filled[i] = 1
        if self._rounding is not None:
            target.copy_(target.to(self._rounding))

    def _rounded(self, value: Tensor) -> Tensor:
        return value if self._rounding is None else round_to(value, self._rounding)

    # -- the update

    def reduce(self, call: int, stop: bool, what: str) -> Table:
        self._end_slot()
        return super().reduce(call, stop, what)

    def _second_round(self, table: Table, what: str) -> None:
        """One round per later lane, so that each lane's sum is a tree of its own."""
        unit = self.final_factor(table)
        for number, weight in enumerate(table.weights[1:], start=1):
            lane = self.lanes.all[number] if number < len(self.lanes.all) else None
            for bucket in self.buckets:
                if not weight or not table.extra[bucket.index]:
                    continue
                scratch = self._scratch_for(bucket)
                for i, target in self._windows(scratch.flat, bucket.index):
                    gradient = lane.gradient(i) if lane is not None else None
                    target.fill_(ABSENT) if gradient is None else target.copy_(gradient)
                if self.world.size > 1:
                    self.world.wait(self.transport.start(scratch), what)
                assert self._reference is not None
                bucket.gradients.add_(scratch.flat, alpha=self._reference / weight / unit)

    def _scratch_for(self, bucket: Bucket) -> Bucket:
        if bucket.index not in self._scratch:
            like = bucket.gradients
            flat = self.transport.allocate(like.numel(), like.dtype, like.device)
            self._scratch[bucket.index] = Bucket(bucket.index, flat)
        return self._scratch[bucket.index]

    def finish(self) -> None:
        super().finish()
        for parameter in self.parameters:
            parameter.grad = None
        self._free += self._nodes.values()
        if self._leaf is not None:
            self._free.append(self._leaf)
        self._nodes, self._leaf, self._position, self._waits = {}, None, -1, False

    def flush(self, what: str) -> None:
        super().flush(what)
        self._nodes = {}

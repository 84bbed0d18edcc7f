"""Lanes: the j-th backward calls of a step's micro-batches belong together and have a normalisation of their own.

Lane 0 is the usual one call; its gradients lie where `param.grad` is. The gradients of the others are kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from instep.errors import UsageError
from instep.train.reduce.slot_tree import SlotTree
from instep.train.reduce.words import MAX_LANES


@dataclass
class Call:
    """One backward call. position: of its micro-batch among this rank's; weighted_loss: weight * loss."""

    position: int
    weight: Any
    weighted_loss: Any


@dataclass
class Lane:
    """reference: the weight that has factor 1, None while all weights were 0; given: whether a call came with a weight
    of its own; gradients, trees: of lanes 1 and up, by parameter (one of the two)."""

    reference: float | None = None
    given: bool = False
    calls: list[Call] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    trees: dict[int, SlotTree] = field(default_factory=dict)

    def gradient(self, i: int) -> Tensor | None:
        return self.trees[i].total() if i in self.trees else self.gradients.get(i)

    def holds(self, i: int) -> bool:
        return i in self.trees or i in self.gradients


class Lanes:
    """tree_of: makes the tree over slots in which gradients of later lanes are added (exact); None: as they come."""

    def __init__(self, parameters: Sequence[nn.Parameter], tree_of: Callable[[], SlotTree] | None = None) -> None:
        self.all: list[Lane] = []
        self.next = 0
        self._parameters, self._tree_of = parameters, tree_of
        self._position = 0
        self._main: list[Tensor | None] = []

    @property
    def later(self) -> list[Lane]:
        return self.all[1:]

    @property
    def first_reference(self) -> float | None:
        return self.all[0].reference if self.all else None

    def begin_micro_batch(self, position: int) -> None:
        self.next, self._position = 0, position

    def clear(self) -> None:
        self.all, self.next = [], 0

    def open(self, reference: float | None, given: bool) -> None:
        """Announces a backward call. reference: what its weight is divided by; None when the weight is 0."""
        if self.next == MAX_LANES:
            raise UsageError(
                f"step.backward was called more than {MAX_LANES} times for one micro-batch. Add losses up before "
                "the call, or call it less often."
            )
        if self.next == len(self.all):
            self.all.append(Lane())
        lane = self.all[self.next]
        lane.reference = lane.reference or reference
        lane.given |= given

    def skip(self) -> None:
        """The announced call has weight 0 and no backward."""
        self.next += 1

    def enter(self) -> None:
        """Backward begins: gradients of a later lane must not come to those of lane 0."""
        if self.next:
            lane = self.all[self.next]
            self._main = [p.grad for p in self._parameters]
            for i, parameter in enumerate(self._parameters):
                parameter.grad = lane.gradients.get(i)

    def leave(self) -> None:
        if self.next:
            lane = self.all[self.next]
            for i, parameter in enumerate(self._parameters):
                if parameter.grad is not None and self._tree_of is not None:
                    if i not in lane.trees:
                        lane.trees[i] = self._tree_of()
                    lane.trees[i].push(self._position, parameter.grad)
                elif parameter.grad is not None:
                    lane.gradients[i] = parameter.grad
                parameter.grad = self._main[i]
            self._main = []
        self.next += 1

    def drop_last(self) -> None:
        """Takes back the gradients of the call just left, which another rank adds."""
        self.all[self.next - 1].trees.clear()

    def count(self, weight: Any, weighted_loss: Any) -> None:
        """Notes the call just left."""
        self.all[self.next - 1].calls.append(Call(self._position, weight, weighted_loss))

    def num_counted(self) -> int:
        return max((sum(1 for call in lane.calls if float(call.weight)) for lane in self.all), default=0)

    def totals(self, num_positions: int) -> tuple[list[list[float]], list[list[float]]]:
        """Per lane and position, the sums of weights and of weighted losses; of all positions together for 1."""
        weights = [[0.0] * num_positions for _ in self.all]
        losses = [[0.0] * num_positions for _ in self.all]
        for number, lane in enumerate(self.all):
            for call in lane.calls:
                place = call.position if num_positions > 1 else 0
                weights[number][place] += float(call.weight)
                losses[number][place] += float(call.weighted_loss)
        return weights, losses

"""Sums of slots in one fixed binary tree, whoever holds which slots.

The tree over n slots splits off the largest power of two below n on the left. A run of slots that starts at a multiple
of its power-of-two length is a subtree, so ranks can add their own and then each other's. Slots without a value are
absent from the tree, which is what -0.0 does in an addition: x + -0.0 is x, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def carries(position: int) -> int:
    """How many subtrees are complete with this position: the number of trailing ones."""
    return ((~position & (position + 1)).bit_length()) - 1


class SlotTree:
    """One tensor's tree, fed in the order of positions. Keeps at most log2(n) partial sums.

    rounded: applied to each value and each sum.
    """

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        self._rounded = rounded
        self._nodes: dict[int, Tensor] = {}  # by level, the root of a complete left subtree
        self._next = 0

    def push(self, position: int, value: Tensor) -> None:
        """Positions that are passed over are absent."""
        while self._next < position:
            self._settle(None)
        self._settle(self._rounded(value))

    def _settle(self, value: Tensor | None) -> None:
        node = value
        for level in range(carries(self._next)):
            left = self._nodes.pop(level, None)
            node = left if node is None else node if left is None else self._rounded(left + node)
        if node is not None:
            self._nodes[carries(self._next)] = node
        self._next += 1

    def total(self) -> Tensor | None:
        """The sum when all later slots are absent."""
        node: Tensor | None = None
        for level in sorted(self._nodes):
            node = self._nodes[level] if node is None else self._rounded(self._nodes[level] + node)
        return node

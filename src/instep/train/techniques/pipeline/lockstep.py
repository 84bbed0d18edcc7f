"""How ranks that share a stage run their micro-batches when a block is gathered wherever it runs.

A gather is for all of them, so they have to run blocks in the same order. They do where their schedules are the same;
where they are not (a short last batch, other shapes of inputs), micro-batches go through one by one, and a rank with
fewer of them runs its newest once more with weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Passes:
    """turns: micro-batches one by one, so many on every rank; None lets each schedule run as it is. is_whole: parameters
    have to be whole, since a rank has nothing to run."""

    turns: int | None = None
    is_whole: bool = False


def plan_passes(everyone: Sequence[tuple[Sequence[int], bool]]) -> Passes:
    """everyone: by rank, how many micro-batches go through each of its schedules, and whether it could repeat one."""
    sizes = [list(found) for found, _ in everyone]
    if all(found == sizes[0] for found in sizes):
        return Passes()
    if any(not found and not can_repeat for found, can_repeat in everyone):
        return Passes(is_whole=True)
    return Passes(turns=max(sum(found) for found in sizes))

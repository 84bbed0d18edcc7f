"""The backward of a loss over all rows under `exact=True`.

Every rank computes the same loss from the same rows. Its gradients for the rows go through the micro-batches, each into its
slot of the tree. What the loss reaches beside the rows (a temperature, say) has one gradient, the same on every rank, and
belongs to no slot: the first rank that has rows sends it, in a lane of its own. That rank alone counts the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from instep.train.data.loader import MicroBatch
from instep.train.rows import backward_rows
from instep.train.update import Trained

if TYPE_CHECKING:
    from instep.train.run import Run
    from instep.train.step import Step


def backward_exactly(
    run: Run,
    step: Step,
    loss: Tensor,
    weight: float,
    given: bool,
    factor: float,
    chosen: Sequence[Trained],
    inputs: Sequence[Tensor] | None,
) -> None:
    """As step.backward, which has checked all of it: loss times `factor` reaches the parameters of `chosen`."""
    has_first = step._rows[0].has_first
    counted = weight if has_first else 0.0
    for trained in chosen:
        lanes = trained.reducer.lanes
        lanes.begin_micro_batch(0)
        lanes.open(step._reference, given)
        lanes.skip()
        lanes.open(step._reference, given)
    with _receiving(chosen):
        step._run_backward(loss * factor, inputs)
    for trained in chosen:
        trained.reducer.lanes.count(counted, float(loss.detach()) * counted)
        if not has_first:
            trained.reducer.lanes.drop_last()

    @contextmanager
    def slot(position: int, batch: MicroBatch) -> Iterator[None]:
        place = batch.slot - run._slots.local.start
        for trained in chosen:
            trained.reducer.begin_micro_batch(place, position == len(step._batches) - 1)
        with _receiving(chosen):
            yield
        for trained in chosen:
            trained.reducer.lanes.count(0.0 if position else counted, 0.0)

    backward_rows(run, step._rows, step._batches, 1.0, inputs, slot)


@contextmanager
def _receiving(chosen: Sequence[Trained]) -> Iterator[None]:
    for trained in chosen:
        trained.reducer.enter_backward()
    try:
        yield
    finally:
        for trained in chosen:
            trained.reducer.leave_backward()

"""All that the ranks of one run tell about each other, in the order in which it would be the cause of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from instep.verify.parting import Parting
from instep.verify.records import Record
from instep.verify.within.data import epoch_order, same_data
from instep.verify.within.gradients import different_gradients, mean_of_local
from instep.verify.within.habits import accumulation, clipped_scaled, dropout_streams
from instep.verify.within.weights import (
    averages_parameters,
    parameter_order,
    starting_weights,
    statistics,
    weights_after,
)

CHECKS: tuple[Callable[[Record], Iterator[Parting]], ...] = (
    parameter_order,
    starting_weights,
    same_data,
    clipped_scaled,
    accumulation,
    different_gradients,
    mean_of_local,
    weights_after,
    statistics,
    dropout_streams,
    epoch_order,
)
# What does not hold where a script averages parameters instead of gradients.
OF_GRADIENTS = (different_gradients, mean_of_local, weights_after)
CONSEQUENCES = {
    # what is not worth saying when the key was found at the same step or before
    "parameter-order": {"*"},
    "initial-weights": {"*"},
    "loaded-on-some-ranks": {"*"},
    "weights-changed-outside": {"*"},
    "gradients": {"parameters", "weights before the step"},
    "samples": {"dropout"},
}


def judge_ranks(record: Record) -> list[Parting]:
    """The partings inside one run, the first cause first."""
    if record.num_steps == 0:
        return []
    checks = [check for check in CHECKS if check not in OF_GRADIENTS] if averages_parameters(record) else CHECKS
    found = [parting for check in checks for parting in check(record)]
    order = {id(parting): place for place, parting in enumerate(found)}
    found.sort(key=lambda parting: (parting.step, order[id(parting)]))
    kept: list[Parting] = []
    for parting in found:
        hidden = set().union(*(CONSEQUENCES.get(k.cause.id, set()) | CONSEQUENCES.get(k.quantity, set()) for k in kept))
        if "*" not in hidden and parting.quantity not in hidden:
            kept.append(parting)
    return kept

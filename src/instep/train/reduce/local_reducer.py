"""The reducer of local SGD (Stich, 2019): no gradient is sent. What ranks tell each other at each update is only how
much there was and whether all of it is finite, so that the loss is the global batch's and all skip a step together.

A rank's gradient is N times its share of the global mean: for plain SGD the mean of the ranks' weights after one step is
then the weights that a step with averaged gradients gives, however uneven the ranks' samples are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from instep.train.reduce.group_sum import GroupSum
from instep.train.reduce.norm import gradient_norm
from instep.train.reduce.reducer import Reducer
from instep.train.reduce.words import Note, Table, Words, check_calls
from instep.train.world import World


class LocalReducer(Reducer):
    """every: steps from one average of the parameters to the next, which `techniques/local_sgd` takes."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, every: int) -> None:
        alone = replace(world, rank=0, size=1, host_group=None, meeting=None)
        super().__init__(parameters, alone, GroupSum(None))
        self.ranks, self.every = world, every
        self.group = world.new_group()
        self.parameters_apart = self.state_apart = False  # equal on all ranks, who make the same updates
        self._messages = Words(world.rank, world.size, 0, 1)
        self._num_failed = 0
        self._what = ""  # the call that is under way, as errors name it

    def reduce(self, call: int, stop: bool, what: str) -> Table:
        self._what = what
        self.parameters_apart = self.state_apart = True
        return super().reduce(call, stop, what)

    def _build(self, what: str) -> bool:
        super()._build(what)
        return True  # a rank without a gradient yet still has to meet the others

    def _alone(self, note: Note) -> Table:
        own = super()._alone(note)
        later = [gradient for lane in self.lanes.later for gradient in lane.gradients.values()]
        failed = not math.isfinite(gradient_norm([*self.gradients(), *later]))
        row = torch.zeros(self._messages.numel, dtype=torch.float64)
        self._messages.write(row, note, np.zeros(0), np.array([float(failed)]))
        if self.ranks.size > 1:
            self.ranks.wait(dist.all_reduce(row, group=self.ranks.host_group, async_op=True), self._what)
        table = self._messages.read(row)
        check_calls(table.calls)
        self._num_failed = int(table.extra[0])
        return replace(table, used=own.used, extra=own.extra)

    def _lane_factors(self, table: Table) -> list[float]:
        return [factor * self.ranks.size for factor in super()._lane_factors(table)]

    def final_factor(self, table: Table) -> float:
        return super().final_factor(table) * self.ranks.size

    def norm(self) -> float:
        """Of this rank's own gradient, which is what it clips; not a number when any rank's is not finite."""
        return math.nan if self._num_failed else super().norm()

"""The reducer of one stage of a pipeline whose parameters are shared out over ranks as well (FSDP2).

Gradients are reduced once, at the update, whatever the number of micro-batches of a rank: no schedule has a reduction
inside, so zero-bubble schedules, which would reduce wrongly inside backward, have right gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.train.mesh import Grid
from instep.train.reduce.local_part import is_cut, local_part
from instep.train.reduce.norm import norm_over_peers
from instep.train.reduce.shard_reducer import ShardReducer
from instep.train.reduce.stages import Tied, agree_totals, note
from instep.train.reduce.words import Table
from instep.train.techniques.pipeline.shard_stages import ShardedStages


class StageShardReducer(ShardReducer):
    def __init__(
        self,
        stages: ShardedStages,
        parameters: Sequence[nn.Parameter],
        grid: Grid,
        copies: int,
        tied: Sequence[Tied],
    ) -> None:
        super().__init__(nn.Module(), parameters, grid, copies)  # a model of its own: there are no turns to watch
        self._stages, self._tied = stages, tied

    def begin_pass(self, overlap: bool) -> None:
        """The pass gathers parameters itself, as its schedules need them."""

    def plan_turns(self, own: int, what: str) -> None:
        """No collective depends on the number of micro-batches."""

    def begin_schedule(self) -> None:
        """As `begin_pass`."""

    def end_schedule(self) -> None:
        """Gradients wait for `reduce`."""

    def enter_backward(self) -> None:
        """A loss over rows: its gradients come with the pass that follows."""

    def begin_evaluation(self) -> None:
        """Parameters are whole while an evaluation runs: there are no turns."""

    def end_evaluation(self) -> None:
        """As `begin_evaluation`."""

    def note(self, position: int, reference: float, result: Any) -> None:
        note(self.lanes, position, reference, result)

    def reduce(self, call: int, stop: bool, what: str) -> Table:
        self._stages.reduce()
        here = {id(parameter) for parameter in self.parameters}
        for tied in self._tied:
            parameter = tied.parameter
            if id(parameter) in here and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                tied.sum(parameter.grad)
        return agree_totals(self.grid, super().reduce(call, stop, what), what)

    def finish(self) -> None:
        self._stages.drop()
        super().finish()

    def norm(self) -> float:
        twice = {id(tied.parameter) for tied in self._tied if not tied.counts_here}
        found = [(is_cut(p), local_part(p.grad)) for p in self.parameters if p.grad is not None and id(p) not in twice]
        cut, alike = ([gradient for is_cut, gradient in found if is_cut is wanted] for wanted in (True, False))
        return norm_over_peers(cut, alike, self.grid, self._copies)

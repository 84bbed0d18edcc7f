"""The reducer of one stage of a pipeline: sums over the ranks that hold the same stage, and agrees with the other stages.

A schedule runs all micro-batches of a pass, so nothing is sent before the update. Zero-bubble schedules put gradients in
`param.grad` without telling autograd's hooks; they are taken up when the schedule is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.train.absent import is_absent
from instep.train.mesh import Grid
from instep.train.reduce.bucket import Transport
from instep.train.reduce.local_part import is_cut, local_part
from instep.train.reduce.norm import norm_over_peers
from instep.train.reduce.reducer import Reducer
from instep.train.reduce.stages import Tied, agree_totals, note
from instep.train.reduce.words import Table


class StageReducer(Reducer):
    """tied: parameters of this stage that other ranks of the pipeline hold as well."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], grid: Grid, transport: Transport, tied: Sequence[Tied]
    ) -> None:
        super().__init__(_held(parameters), grid.data, transport)
        self.grid: Grid = grid
        self._tied = tied

    def begin_step(self, parameters: Sequence[nn.Parameter], reference: float | None) -> None:
        super().begin_step(_held(parameters), reference)

    def begin_pass(self, overlap: bool) -> None:
        super().begin_pass(False)

    def begin_schedule(self) -> None:
        self.begin_micro_batch(0, False)
        for i, parameter in enumerate(self.parameters):
            if not self._filled[i] and parameter.requires_grad:
                parameter.grad = None  # what is there afterwards has come in this pass
        self.receiving = True

    def end_schedule(self) -> None:
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad and parameter.grad is not None:
                self._arrived(i, parameter)
        self.receiving = False

    def note(self, position: int, reference: float, result: Any) -> None:
        note(self.lanes, position, reference, result)

    def reduce(self, call: int, stop: bool, what: str) -> Table:
        self._sum_tied()
        return agree_totals(self.grid, super().reduce(call, stop, what), what)

    def _sum_tied(self) -> None:
        numbers = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self.receiving = True
        for tied in self._tied:
            i, parameter = numbers.get(id(tied.parameter)), tied.parameter
            if i is not None and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                tied.sum(parameter.grad)
                self._arrived(i, parameter)
        self.receiving = False

    def norm(self) -> float:
        twice = {id(tied.parameter) for tied in self._tied if not tied.counts_here}
        if not twice:
            return super().norm()
        found = [(is_cut(p), local_part(p.grad)) for p in self.parameters if p.grad is not None and id(p) not in twice]
        cut, alike = ([gradient for is_cut, gradient in found if is_cut is wanted] for wanted in (True, False))
        return norm_over_peers(cut, alike, self.grid, copies=0)


def _held(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if not is_absent(parameter)]

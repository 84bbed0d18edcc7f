"""The reducer of sharded parameters: FSDP2 moves the gradients, this one counts turns, weights and norms.

The same interface as `Reducer`. FSDP2 sums over ranks in the backward of a pass's last turn, which every rank takes at
the same time (`techniques/turns`); the totals that make a mean of the sums go in one small all-reduce at the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.errors import UsageError
from instep.train.mesh import Grid
from instep.train.reduce.group_sum import GroupSum
from instep.train.reduce.lanes import Lanes
from instep.train.reduce.local_part import is_cut, local_part
from instep.train.reduce.norm import norm_over_peers
from instep.train.reduce.words import Note as WordsNote
from instep.train.reduce.words import Table, Words, check_calls
from instep.train.techniques.shard import sharded_modules
from instep.train.techniques.turns import Turns


class ShardReducer:
    """model: sharded; copies: how many ranks hold the same shard (the replicate axis)."""

    rates = 0  # a digest that has to be the same on all ranks, see `Note`

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], grid: Grid, copies: int) -> None:
        self.grid, self.world, self.parameters = grid, grid.data, list(parameters)
        self.transport = GroupSum(None)
        self.lanes = Lanes(self.parameters)
        self._copies = copies
        self._modules = sharded_modules(model)
        self._turns = Turns(model)
        self._reference: float | None = None
        self._planned, self._taken = 0, 0
        self._in_turn, self._had_backward = False, False
        self._words = Words(self.world.rank, self.world.size, 0, 0)

    @property
    def stray(self) -> Any:
        return self._turns.stray

    def close(self) -> None:
        self._turns.close()

    def begin_step(self, parameters: Sequence[nn.Parameter], reference: float | None) -> None:
        self._turns.stray = None
        self._reference = reference
        if len(parameters) != len(self.parameters):
            raise UsageError(
                f"the optimizer has {len(parameters)} parameters, {len(self.parameters)} when it was prepared: a sharded split "
                "cannot take up new ones. Prepare the model with all of them, frozen by requires_grad_(False) until needed."
            )

    def begin_pass(self, overlap: bool) -> None:
        self._finish_turns()
        self._planned, self._taken = 0, 0

    def plan_turns(self, own: int, what: str) -> None:
        """The pass has as many turns as the rank with the most micro-batches. Every rank must call it."""
        self._planned = max(self.world.gather_objects(own, what))

    def begin_micro_batch(self, position: int, last: bool) -> None:
        self._end_turn()
        self.lanes.begin_micro_batch(position)
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._turns.begin()
        self._taken += 1
        self._in_turn, self._had_backward = True, False
        is_last = self._taken == self._planned
        for module in self._modules:
            module.set_requires_gradient_sync(is_last, recurse=False)

    def _end_turn(self) -> None:
        if self._in_turn:
            self._in_turn = False
            self._turns.end(self._had_backward)

    def _finish_turns(self) -> None:
        self._end_turn()
        while self._taken < self._planned:
            self._begin_turn()
            self._end_turn()

    def enter_backward(self) -> None:
        if self.lanes.next:
            raise UsageError(
                "a sharded split takes one step.backward per micro-batch: add the losses up before the call, or train with "
                "parallel='ddp'."
            )
        if not self._planned:
            raise UsageError(
                "a sharded split needs step.backward inside the inner loop: every rank takes the same turns."
            )
        self._turns.receiving = True
        self._had_backward = True

    def has_lost_gradients(self) -> bool:
        """Unknown here: FSDP2 keeps what was added up."""
        return False

    def leave_backward(self) -> None:
        self._turns.receiving = False
        self.lanes.next += 1

    def reduce(self, call: int, stop: bool, what: str) -> Table:
        self._finish_turns()
        weights, losses = self.lanes.totals(1)
        given = bool(self.lanes.all) and self.lanes.all[0].given
        note = WordsNote(call, self.lanes.num_counted(), int(given), int(stop), weights, losses, self.rates)
        if self.world.size == 1:
            return Table.of([note], np.zeros(0), np.zeros(0))
        tail = torch.zeros(self._words.numel, dtype=torch.float64)
        self._words.write(tail, note, np.zeros(0), np.zeros(0))
        self._sum(tail, what)
        table = self._words.read(tail)
        check_calls(table.calls)
        return table

    def _sum(self, tensor: Tensor, what: str) -> None:
        if self.world.size > 1:
            self.world.wait(dist.all_reduce(tensor, group=self.world.host_group, async_op=True), what)

    def final_factor(self, table: Table) -> float:
        weight = table.weights[0] if table.weights else 0.0
        return self._reference / weight if self._reference and weight else 1.0

    def gradients(self) -> list[Tensor]:
        """This rank's parts."""
        return [local_part(p.grad) for p in self.parameters if p.grad is not None]

    def norm(self) -> float:
        """Over all shards. Every rank must call it."""
        pairs = [(is_cut(p), local_part(p.grad)) for p in self.parameters if p.grad is not None]
        cut, alike = ([g for cut, g in pairs if cut is wanted and g.numel()] for wanted in (True, False))
        return norm_over_peers(cut, alike, self.grid, self._copies)

    def finish(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.lanes.clear()
        self._planned, self._taken, self._in_turn = 0, 0, False

    def begin_evaluation(self) -> None:
        """Before each batch of an evaluation."""
        self._turns.begin_evaluation()

    def end_evaluation(self) -> None:
        self._turns.end_evaluation()

    def replay_forward(self) -> None:
        """A turn of an evaluation in which this rank has no batch left."""
        self._turns.replay_forward()

    def flush(self, what: str) -> None:
        """Nothing is under way between passes: a pass's last turn has summed its gradients."""

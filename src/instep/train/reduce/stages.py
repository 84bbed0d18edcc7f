"""What the reducers of a pipeline's stages have in common: totals of all stages, and parameters that several hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.train.mesh import Grid
from instep.train.reduce.lanes import Lanes
from instep.train.reduce.local_part import local_part
from instep.train.reduce.words import Table
from instep.train.world import World


@dataclass(frozen=True)
class Tied:
    """A parameter that several ranks of a pipeline hold. ranks: of `pipeline`, in order; group: theirs, with the device's
    backend."""

    parameter: nn.Parameter
    pipeline: World
    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def counts_here(self) -> bool:
        """One of the holders counts it in the norm."""
        return self.pipeline.rank == self.ranks[0]

    def sum(self, mine: Tensor) -> None:
        """Adds up a gradient over all holders, in one order, so that it is the same on each. Every holder calls it."""
        local = local_part(mine)
        sent = local.to(self.pipeline.device).contiguous()  # it may be on the host
        parts = {rank: torch.empty_like(sent) for rank in self.ranks}
        parts[self.pipeline.rank] = sent
        others = [rank for rank in self.ranks if rank != self.pipeline.rank]
        sends = [dist.P2POp(dist.isend, parts[self.pipeline.rank], group=self.group, group_peer=r) for r in others]
        receives = [dist.P2POp(dist.irecv, parts[rank], group=self.group, group_peer=rank) for rank in others]
        for work in dist.batch_isend_irecv(sends + receives):
            work.wait()
        total = parts[self.ranks[0]].clone()
        for rank in self.ranks[1:]:
            total += parts[rank]
        local.copy_(total)


def note(lanes: Lanes, position: int, reference: float, result: Any) -> None:
    """Counts a micro-batch that a schedule has run. result: weight, weighted loss, whether the script gave the weight."""
    lanes.begin_micro_batch(position)
    lanes.open(reference if result.weight else None, result.given)
    lanes.skip()
    if result.weight:
        lanes.count(result.weight, result.weighted_loss)


def agree_totals(grid: Grid, table: Table, what: str) -> Table:
    """A stage of which no parameter got a gradient takes the totals of one that has some. Every rank must call it."""
    is_reached = bool(table.counted) and (not table.used.size or bool(table.used.any()))
    mine: Sequence[float] = [is_reached, table.counted, table.given, sum(table.weights), sum(table.losses)]
    rows = [torch.zeros(len(mine), dtype=torch.float64) for _ in range(grid.peers.size)]
    row = torch.tensor(mine, dtype=torch.float64)
    grid.peers.wait(dist.all_gather(rows, row, group=grid.peers.host_group, async_op=True), what)
    reached, counted, given, weight, loss = max((row.tolist() for row in rows), key=lambda row: row[0])
    if is_reached or not reached:
        return table
    return replace(
        table,
        counted=int(counted),
        given=int(given),
        weights=[weight],
        losses=[loss],
        used=np.zeros(0),
        extra=np.zeros(0),
    )

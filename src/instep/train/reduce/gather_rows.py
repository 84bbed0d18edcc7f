"""All-gather into one tensor, under the name that the installed torch has for it (2.13 renamed it)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def gather_rows(rows: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> None:
    """rows: (ranks, ...), contiguous; row r becomes what rank r gave as `mine`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows.view(-1), mine.view(-1), group=group)

"""How many targets counted in a loss that is a mean over them, read from the graph of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from instep.launch.probe.recorder import Recorder, contained

_EVERY = 8  # backwards between two looks, after the first eight
_MOST_NODES = 12  # from the loss: divisions, scales and sums lie between
_MEAN = 1


def is_token_turn(backwards: int) -> bool:
    return backwards <= 8 or not backwards % _EVERY


@contained
def count_tokens(recorder: Recorder, loss: torch.Tensor, site: int) -> None:
    """Only on the CPU: elsewhere it would make the host wait."""
    if not loss.is_cpu:
        return
    node = find_mean_loss(loss.grad_fn)
    if node is None:
        count = find_count(loss.grad_fn)
        if count is not None:
            recorder.log.note("tokens", site=site, call=recorder.backwards, valid=count, total=None)
        return
    if node._saved_weight is not None:
        return
    valid, total = int(node._saved_total_weight), node._saved_target.numel()
    if valid < total:
        recorder.log.note("tokens", site=site, call=recorder.backwards, valid=valid, total=total)


def find_count(node: Any) -> int | None:
    """What a sum was divided by right behind a loss, when that is a tensor that holds a count: the sum of a mask."""
    found: list[int] = []
    for near in _nearest(node):
        divisor = near._saved_other if type(near).__name__.startswith("DivBackward") else None
        if isinstance(divisor, torch.Tensor) and not divisor.dim() and not divisor.requires_grad:
            value = divisor.item()
            if value > 1 and value == int(value):
                found.append(int(value))
    return max(found, default=None)  # a number of micro-batches may stand beside it


def _nearest(node: Any) -> Iterator[Any]:
    queue, seen = [node], 0
    while queue and seen < _MOST_NODES:
        node, seen = queue.pop(0), seen + 1
        if node is not None:
            yield node
            queue += [parent for parent, _ in node.next_functions]


def find_mean_loss(node: Any) -> Any:
    """The nearest negative log-likelihood behind a loss, when it is a mean."""
    for near in _nearest(node):
        if type(near).__name__.startswith("NllLoss"):
            return near if near._saved_reduction == _MEAN else None
    return None

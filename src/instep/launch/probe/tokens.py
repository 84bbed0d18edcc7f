"""How many targets counted in a loss that is a mean over them, read from the graph of the loss."""

from __future__ import annotations

from typing import Any

import torch

from instep.launch.probe.recorder import Recorder, contained

_EVERY = 8  # backwards between two looks, after the first eight
_MOST_NODES = 12  # from the loss: divisions, scales and sums lie between
_MEAN = 1


@contained
def count_tokens(recorder: Recorder, loss: torch.Tensor, site: int) -> None:
    """Only on the CPU: elsewhere it would make the host wait."""
    if (recorder.backwards > 8 and recorder.backwards % _EVERY) or not loss.is_cpu:
        return
    node = find_mean_loss(loss.grad_fn)
    if node is None or node._saved_weight is not None:
        return
    valid, total = int(node._saved_total_weight), node._saved_target.numel()
    if valid < total:
        recorder.log.note("tokens", site=site, call=recorder.backwards, valid=valid, total=total)


def find_mean_loss(node: Any) -> Any:
    """The nearest negative log-likelihood behind a loss, when it is a mean."""
    queue, seen = [node], 0
    while queue and seen < _MOST_NODES:
        node, seen = queue.pop(0), seen + 1
        if node is None:
            continue
        if type(node).__name__.startswith("NllLoss"):
            return node if node._saved_reduction == _MEAN else None
        queue += [parent for parent, _ in node.next_functions]
    return None

"""Stages and schedules of torch.distributed.pipelining, for one kind and number of micro-batches.

torch gets only the numbers of the micro-batches to move about: a stage looks up its inputs itself, and the last one
computes the loss, already with its weight. Shapes are told beforehand, so torch need not find them out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from instep.records.schedules import SCHEDULES
from instep.train.techniques.pipeline.trace import Carried

# (stage, number of the micro-batch, tensors of the stage before) -> tensors for the next stage, or the loss
Work = Callable[[int, int, Sequence[Tensor]], Any]


class StageModule(nn.Module):
    """What torch sees of a stage. parameters: those of the stage that are trained, as they are now."""

    def __init__(self, stage: int, work: Work, parameters: Callable[[], Iterator[nn.Parameter]]) -> None:
        super().__init__()
        self._stage, self._work, self._trained = stage, work, parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._trained()

    def forward(self, *received: Tensor, number: Tensor) -> Any:
        return self._work(self._stage, int(number), received)


def place_stages(name: str, num_ranks: int, per_rank: int) -> list[int]:
    """The rank of each stage: in turn, or there and back."""
    if name in ("zbv", "dualpipev"):
        return [*range(num_ranks), *reversed(range(num_ranks))]
    return [stage % num_ranks for stage in range(num_ranks * per_rank)]


def choose_schedule(name: str, num_ranks: int, per_rank: int, count: int) -> str:
    """The schedule to run so many micro-batches by: the one asked for, or one with the same stages that can."""
    stages = num_ranks * per_rank
    if name == "1f1b" and count < stages:
        return "gpipe"
    if name in ("interleaved_1f1b", "interleaved_zero_bubble") and count % max(1, count // num_ranks):
        return "looped_bfs"
    if name == "dualpipev" and count < stages:
        return "zbv"
    return name


def build_schedule(
    name: str,
    modules: dict[int, StageModule],
    boundaries: Sequence[Sequence[Carried]],
    count: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Callable[[], None]:
    """A function that runs `count` micro-batches through. modules: this rank's stages; boundaries: what stages 1, 2, ...
    receive. Every rank of the pipeline must call both."""
    num_stages = len(boundaries) + 1
    stages = [
        PipelineStage(
            module,
            number,
            num_stages,
            device,
            input_args=_examples(boundaries[number - 1]) if number else (),
            output_args=_examples(boundaries[number]) if number < num_stages - 1 else (torch.zeros((), device=device),),
            group=group,
        )
        for number, module in sorted(modules.items())
    ]
    kind: Any = get_schedule_class(SCHEDULES[name].torch_name)
    is_multi = issubclass(kind, PipelineScheduleMulti)
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)  # it logs what it raises
    schedule = kind(stages if is_multi else stages[0], count, loss_fn=_first, scale_grads=False)
    numbers = torch.arange(count)

    def run() -> None:
        schedule.step(number=numbers, target=numbers, return_outputs=False)

    return run


def _examples(carried: Sequence[Carried]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(each.shape, dtype=each.dtype, device="meta").requires_grad_(each.requires_grad) for each in carried
    )


def _first(loss: Any, number: Tensor) -> Tensor:
    """The last stage's output is the loss."""
    return loss


def busy_share(num_ranks: int, per_rank: int, count: int) -> float:
    """Of the time, were all stages equally fast and nothing to be sent: for 1F1B and its like (Narayanan et al., 2021)."""
    return count * per_rank / (count * per_rank + num_ranks - 1)

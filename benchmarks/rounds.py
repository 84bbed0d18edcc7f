"""Times all variants in the same processes, in turn: a block of steps of each, round after round."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from tasks import Task
from variants import available, mean_over_ranks


@dataclass
class Measured:
    """seconds: rank 0's, per variant, per round, per step; losses: of the first steps, the mean over ranks."""

    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def join() -> tuple[int, int]:
    """This process's rank and the number of ranks, with a gloo group when there are several."""
    torch.set_num_threads(1)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    return int(os.environ.get("RANK", "0")), size


def meet(size: int) -> None:
    if size > 1:
        dist.barrier()


def run_block(steps: Iterator[object], count: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(count):
        next(steps)
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def measure(
    task: Task,
    rank: int,
    size: int,
    num_rounds: int,
    block_steps: int,
    directory: str | None,
    choose: Any = available,
    warm_up: int = 8,
) -> Measured:
    """Every rank must call it. The order of the variants turns by one from round to round. warm_up: steps at least."""
    variants, missing = choose(directory)
    running = {name: iter(start(task, rank, size)) for name, start in variants.items()}
    measured = Measured({name: [] for name in running}, {}, missing)
    for name, steps in running.items():  # warm up, and compare the numbers
        meet(size)
        measured.losses[name] = mean_over_ranks([next(steps) for _ in range(max(block_steps, warm_up))], size)
    names = list(running)
    for number in range(num_rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            meet(size)
            measured.seconds[name].append(run_block(running[name], block_steps))
    return measured


def largest_difference(losses: dict[str, list[float]], baseline: str) -> dict[str, float]:
    """Per variant, the largest relative difference of a loss from the baseline's."""
    reference = losses[baseline]
    return {
        name: max(abs(a - b) / abs(b) for a, b in zip(values, reference))
        for name, values in losses.items()
        if name != baseline
    }

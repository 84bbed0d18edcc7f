"""Whether a model is cut well, from how long its parts took: which cut points would have made stages more even."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from instep.train.techniques.pipeline.cut import Cuts, find_candidates, split_evenly, stages_of

LOSS = ""  # stands for the loss among the names of modules
WORTH_SAYING = 0.85  # of the slowest stage's time: less is within what such a measurement can tell
LEAST_SECONDS = 1e-3  # of the slowest stage: below it, what is measured is mostly Python


class StageClock:
    """Times the forward of parts of a model. On a GPU nothing waits for it before `read`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds[name].append(time.perf_counter() - start)

    def read(self) -> dict[str, float]:
        """Seconds by name, the median over micro-batches."""
        if self._events:
            torch.cuda.synchronize(self._device)
        for name, begin, end in self._events:
            self._seconds[name].append(begin.elapsed_time(end) / 1000)
        self._events = []
        return {name: statistics.median(found) for name, found in self._seconds.items()}


def advise_on_cut(model: nn.Module, cuts: Cuts, seconds: Mapping[str, float]) -> str | None:
    """seconds: by name of a part, of all stages; the loss is the last stage's. None where the cut is as good as any."""
    candidates = find_candidates(model)
    if len(candidates) < cuts.count - 1:
        return None
    spent = _by_stage(seconds, cuts.stages, cuts.count)
    costs = _by_stage(seconds, stages_of(model, candidates), len(candidates) + 1)
    bounds = split_evenly(costs, cuts.count)
    better = [sum(costs[a:b]) for a, b in zip([0, *bounds], [*bounds, len(costs)])]
    if max(spent) < LEAST_SECONDS or max(better) > WORTH_SAYING * max(spent):
        return None
    names = [candidates[bound - 1] for bound in bounds]
    return (
        f"forward takes the stages {_list(spent)} ms per micro-batch, and the slowest sets the pace: Parallel(cut={names}) would "
        f"make it {_list(better)}, where memory allows"
    )


def _by_stage(seconds: Mapping[str, float], stages: Mapping[str, int], count: int) -> list[float]:
    """stages: by the name of each parameter and buffer."""
    found = [0.0] * count
    for name, spent in seconds.items():
        within = (stage for key, stage in stages.items() if key.startswith(f"{name}."))
        found[count - 1 if name == LOSS else next(within, 0)] += spent
    return found


def _list(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1000 * each:.3g}" for each in seconds)

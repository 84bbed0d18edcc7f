"""Where a run stands in its loops, so that it goes on at the same sample after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoopPosition:
    """One call of run.steps. taken: steps done; step: the next one of the epoch; streams: by slot, what iterable
    datasets kept."""

    taken: int = 0
    epoch: int = 0
    step: int = 0
    done: bool = False
    streams: dict[int, Any] | None = None


@dataclass
class Position:
    """loops: one per call of run.steps, in order. next_index: of the next step over all loops."""

    next_index: int = 0
    loops: list[LoopPosition] = field(default_factory=list)

    def loop(self, number: int) -> LoopPosition:
        while len(self.loops) <= number:
            self.loops.append(LoopPosition())
        return self.loops[number]

    def as_json(self) -> dict[str, Any]:
        loops = [
            {"taken": loop.taken, "epoch": loop.epoch, "step": loop.step, "done": loop.done} for loop in self.loops
        ]
        return {"next_index": self.next_index, "loops": loops}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Position:
        return Position(int(data["next_index"]), [LoopPosition(**loop) for loop in data["loops"]])

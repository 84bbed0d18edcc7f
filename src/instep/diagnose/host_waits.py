"""Where a rank's host waits for its device in every step, from the steps that were sampled."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from instep.diagnose.rank_view import RankView
from instep.records.event import Event
from instep.records.finding import CallSite

MIN_SAMPLES = 5
MIN_PRESENCE = 0.8  # of the samples, that a line has to wait in to count as waiting in each step

Key = tuple[int, str, str]  # site, call, by way of


@dataclass(frozen=True)
class WaitingLine:
    """A line that waits in every step. call: of a tensor or of torch.cuda; through: the library's function that the line
    called, empty when it made the call itself; count and seconds: of one step."""

    site: CallSite | None
    call: str
    through: str
    count: float
    seconds: float


@dataclass(frozen=True)
class HostWaits:
    """Medians over the sampled steps. lines: the one that waits longest in front."""

    samples: int
    step_seconds: float
    waited_seconds: float
    data_seconds: float
    lines: tuple[WaitingLine, ...]

    @property
    def waited(self) -> float:
        """Share of a step."""
        return min(1.0, self.waited_seconds / self.step_seconds) if self.step_seconds > 0 else 0.0

    @property
    def lost(self) -> float:
        """The most that these waits can cost, as a share of a step: without them it takes at least as long as the host
        is at work, and at least as long as the device was while the host waited."""
        return min(self.waited, 1.0 - self.waited)

    @property
    def count(self) -> float:
        return sum(line.count for line in self.lines)


def measure_waits(view: RankView) -> HostWaits | None:
    """None when there are too few samples, as where no device has a queue of its own."""
    samples = view.named("host-waits")
    if len(samples) < MIN_SAMPLES:
        return None
    tables = [{_key(row): row for row in sample["lines"]} for sample in samples]
    seen = {key for table in tables for key in table}
    steady = {key for key in seen if sum(key in table for table in tables) >= MIN_PRESENCE * len(tables)}
    lines = [_line(view, key, [table[key] for table in tables if key in table]) for key in steady]
    waited = [sum(row["seconds"] for key, row in table.items() if key in steady) for table in tables]
    return HostWaits(
        len(samples),
        _median(samples, "seconds"),
        statistics.median(waited),
        _median(samples, "data"),
        tuple(sorted(lines, key=lambda line: (-line.seconds, line.call))),
    )


def _key(row: dict[str, object]) -> Key:
    return int(str(row["site"])), str(row["call"]), str(row["through"])


def _line(view: RankView, key: Key, rows: list[dict[str, float]]) -> WaitingLine:
    count, seconds = (statistics.median(row[name] for row in rows) for name in ("count", "seconds"))
    return WaitingLine(view.site(key[0]), key[1], key[2], count, seconds)


def _median(samples: list[Event], name: str) -> float:
    return statistics.median(sample[name] for sample in samples)

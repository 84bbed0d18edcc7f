"""Parameters that no DistributedDataParallel averages, side by side: what the script averaged itself, and where ranks part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import CallSite

_APART = 1e-4  # relative: equal steps on equal numbers give equal bits
MIN_STEPS = 6
MIN_SHARE = 0.8  # of the steps


@dataclass(frozen=True)
class PlainModel:
    """The parameters of one optimizer that are in no wrapped model, on all ranks. averages: of rank 0, one per step;
    first_apart: by parameter, the number of optimizer steps after which the ranks' values were seen to differ for good."""

    view: RankView
    optimizer: Event
    averages: list[Event]
    first_apart: dict[str, int]

    @property
    def site(self) -> CallSite | None:
        return self.view.site(self.optimizer["site"])

    @property
    def averaged(self) -> list[Event]:
        """Steps before which the script joined gradients of the ranks itself; empty unless it did so nearly always."""
        rows = [row for row in self.averages if row["reduced"]]
        return rows if len(rows) >= max(MIN_STEPS, MIN_SHARE * len(self.averages)) else []

    @property
    def averaged_at(self) -> CallSite | None:
        return self.view.site(self.averaged[-1]["site"]) if self.averaged else None


def plain_models(run: RunView) -> Iterator[PlainModel]:
    """Of optimizers that every rank made alike."""
    if not run.is_whole or run.world_size < 2:
        return
    tables = [{event["optimizer"]: event for event in view.named("optimizer")} for view in run.ranks]
    for number, event in tables[0].items():
        rows = [table[number] for table in tables if number in table]
        alike = len(rows) == len(tables) and all(row["shapes"] == event["shapes"] for row in rows)
        if alike and event["names"] and not event["unseen"]:
            view = run.ranks[0]
            averages = [row for row in view.named("average-by-hand") if row["optimizer"] == number]
            yield PlainModel(view, event, averages, _first_apart(run, number, event["names"]))


def _first_apart(run: RunView, number: int, names: list[str]) -> dict[str, int]:
    prints = [
        {row["count"] - 1: row["values"] for row in view.named("plain-print") if row["optimizer"] == number}
        for view in run.ranks
    ]
    found: dict[str, int] = {}
    for step in sorted(step for step in prints[0] if all(step in table for table in prints)):
        for index, name in enumerate(names):
            values = [table[step][index] for table in prints]
            if _gap(values) <= _APART:
                found.pop(name, None)
            else:
                found.setdefault(name, step)
    return found


def _gap(values: list[float | None]) -> float:
    numbers = [value for value in values if value is not None]
    size = max((abs(value) for value in numbers), default=0.0)
    return (max(numbers) - min(numbers)) / size if len(numbers) == len(values) and size > 1e-12 else 0.0


def name_some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

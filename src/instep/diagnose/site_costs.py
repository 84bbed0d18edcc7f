"""What single lines of the script cost, from the sums that each rank kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from instep.diagnose.frames import source_line
from instep.diagnose.rank_view import RankView
from instep.records.finding import CallSite

Line = tuple[str, int]
MIN_SAMPLES = 8  # five a second are taken
MIN_SHARE = 0.5  # of the samples between the parts of a step
MAX_MODELS = 0.1  # of the samples between the parts of a step, inside of a model
MAX_ELSEWHERE = 0.2  # of the other samples: the line of a loop's function holds all of them


@dataclass(frozen=True)
class Cost:
    """Calls at one line since the first steps, and the seconds they took together."""

    site: CallSite
    calls: int
    seconds: float


def costs_of(view: RankView, kind: str) -> list[Cost]:
    """kind: collectives or saves; the most expensive first."""
    event = view.last("site-costs")
    rows: list[tuple[int, int, float]] = event[kind] if event is not None else []
    found = [Cost(site, int(calls), seconds) for number, calls, seconds in rows if (site := view.site(number))]
    return sorted(found, key=lambda cost: -cost.seconds)


def busiest_loop_line(view: RankView) -> tuple[CallSite, float] | None:
    """The outermost line of the script in which it is for most of what it does between the parts of a step, and seldom
    otherwise; and the share of such samples."""
    event = view.last("site-costs")
    stacks: list[tuple[str, list[Line], int]] = event["stacks"] if event is not None else []
    loop, parts = Counter[Line](), Counter[Line]()
    depth: dict[Line, int] = {}
    for part, lines, count in stacks:
        for place, line in enumerate(lines):
            (loop if part == "loop" else parts)[(line[0], line[1])] += count
            depth[(line[0], line[1])] = max(depth.get((line[0], line[1]), 0), place)
    total, others = sum(n for part, _, n in stacks if part == "loop"), sum(n for part, _, n in stacks if part != "loop")
    models = sum(n for part, _, n in stacks if part == "model")
    if models > MAX_MODELS * (total + models):
        return None  # an environment of reinforcement learning, or an evaluation by hand
    wanted = [
        line for line, n in loop.items() if n >= MIN_SHARE * total and parts[line] <= MAX_ELSEWHERE * max(1, others)
    ]
    if not wanted or total < MIN_SAMPLES:
        return None
    line = max(wanted, key=lambda one: depth[one])
    return CallSite(*line, source_line(*line)), loop[line] / total

"""A checkpoint was loaded into a wrapped model on some ranks only.

## What it sees
`load_state_dict` on a wrapped model on some ranks, and parameters that differ between ranks afterwards.

## Why it matters
DistributedDataParallel sends rank 0's parameters when it is built, and never again. From then on it averages gradients, not parameters: ranks that start from different weights stay apart.

## What to do
Load on every rank, or before the model is wrapped.

## When it is wrong
A load that is followed by a broadcast of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.model_facts import find_apart, same_group
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import CallSite, Evidence, Finding


def check(run: RunView) -> Iterator[Finding]:
    apart = find_apart(run)
    if apart is None:
        return
    wrapper, step, name, gap = apart
    members = same_group(run, wrapper)
    differs = f"step {step}: {name} differs between ranks by {gap:.0%}"
    finding = _weights(run, members, wrapper, differs) or _optimizer_state(run, members, differs)
    if finding is not None:
        yield finding


def _weights(run: RunView, members: list[RankView], wrapper: int, differs: str) -> Finding | None:
    loads = {view.rank: [one for one in view.named("load") if one["wrapper"] == wrapper] for view in members}
    found = _who_loaded(run, loads)
    if found is None:
        return None
    who, event = found
    rank, _, where = who
    return _finding(
        run,
        who,
        "checkpoint",
        cause=f"load_state_dict at {short(where)} ran on rank {rank} after the model was wrapped; the others kept their weights, and averaging gradients does not bring them together.",
        fix=f"run {short(where)} on every rank, or load before the model is wrapped",
        facts=(f"loaded {event['keys']} entries at {short(where)} after step {event.step}", differs),
    )


def _optimizer_state(run: RunView, members: list[RankView], differs: str) -> Finding | None:
    """The same of an optimizer: equal gradients with different moments and step counts give different updates."""
    loads = {view.rank: view.named("optimizer-load") for view in members}
    found = _who_loaded(run, loads)
    if found is None:
        return None
    who, event = found
    rank, _, where = who
    return _finding(
        run,
        who,
        "optimizer state",
        cause=f"load_state_dict of the optimizer at {short(where)} ran on rank {rank} alone: from equal gradients the ranks make different updates, "
        "and their parameters part.",
        fix=f"run {short(where)} on every rank",
        facts=(f"loaded the state of {event['entries']} parameters at {short(where)}", differs),
    )


Who = tuple[int, tuple[int, ...], CallSite | None]  # the rank that loaded, those that did not, and where


def _who_loaded(run: RunView, loads: dict[int, list[Event]]) -> tuple[Who, Event] | None:
    """The first rank that loaded most often, those that did so less, and its newest load; None where all are alike."""
    most = max((len(rows) for rows in loads.values()), default=0)
    without = tuple(rank for rank, rows in loads.items() if len(rows) < most)
    if not without:
        return None
    rank = next(rank for rank, rows in loads.items() if len(rows) == most)
    event = loads[rank][-1]
    return (rank, without, run.by_rank[rank].site(event["site"])), event


def _finding(
    run: RunView,
    who: Who,
    what: str,
    *,
    cause: str,
    fix: str,
    facts: tuple[str, str],
) -> Finding:
    """facts: of the rank that loaded, and of the ranks together."""
    rank, without, where = who
    return Finding(
        id="numbers/loaded-on-some-ranks",
        title=f"{name_ranks(without)} did not load the {what} that rank {rank} loaded",
        cause=cause,
        fix=(fix,),
        evidence=(
            run.by_rank[rank].cite(facts[0]),
            Evidence(facts[1], f"rank{without[0]}/events.jsonl", without[0]),
        ),
        certainty="certain",
        ranks=without,
        where=where,
        explains=("numbers/ranks-apart",),
    )

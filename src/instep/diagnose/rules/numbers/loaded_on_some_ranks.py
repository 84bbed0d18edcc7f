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
from instep.records.finding import Evidence, Finding


def check(run: RunView) -> Iterator[Finding]:
    apart = find_apart(run)
    if apart is None:
        return
    wrapper, step, name, gap = apart
    members = same_group(run, wrapper)
    loads = {view.rank: [one for one in view.named("load") if one["wrapper"] == wrapper] for view in members}
    most = max((len(rows) for rows in loads.values()), default=0)
    without = tuple(rank for rank, rows in loads.items() if len(rows) < most)
    if not without:
        yield from _optimizer_state(run, members, step, name, gap)
        return
    rank = next(rank for rank, rows in loads.items() if len(rows) == most)
    event = loads[rank][-1]
    where = run.by_rank[rank].site(event["site"])
    yield Finding(
        id="numbers/loaded-on-some-ranks",
        title=f"{name_ranks(without)} did not load the checkpoint that rank {rank} loaded",
        cause=f"load_state_dict at {short(where)} ran on rank {rank} after the model was wrapped; the others kept their weights, and averaging gradients does not bring them together.",
        fix=(f"run {short(where)} on every rank, or load before the model is wrapped",),
        evidence=(
            run.by_rank[rank].cite(f"loaded {event['keys']} entries at {short(where)} after step {event.step}"),
            Evidence(
                f"step {step}: {name} differs between ranks by {gap:.0%}", f"rank{without[0]}/events.jsonl", without[0]
            ),
        ),
        certainty="certain",
        ranks=without,
        where=where,
        explains=("numbers/ranks-apart",),
    )


def _optimizer_state(run: RunView, members: list[RankView], step: int, name: str, gap: float) -> Iterator[Finding]:
    """The same of an optimizer: equal gradients with different moments and step counts give different updates."""
    loads = {view.rank: view.named("optimizer-load") for view in members}
    most = max((len(rows) for rows in loads.values()), default=0)
    without = tuple(rank for rank, rows in loads.items() if len(rows) < most)
    if not without:
        return
    rank = next(rank for rank, rows in loads.items() if len(rows) == most)
    where = run.by_rank[rank].site(loads[rank][-1]["site"])
    yield Finding(
        id="numbers/loaded-on-some-ranks",
        title=f"{name_ranks(without)} did not load the optimizer state that rank {rank} loaded",
        cause=f"load_state_dict of the optimizer at {short(where)} ran on rank {rank} alone: from equal gradients the ranks make different updates, "
        "and their parameters part.",
        fix=(f"run {short(where)} on every rank",),
        evidence=(
            run.by_rank[rank].cite(f"loaded the state of {loads[rank][-1]['entries']} parameters at {short(where)}"),
            Evidence(
                f"step {step}: {name} differs between ranks by {gap:.0%}", f"rank{without[0]}/events.jsonl", without[0]
            ),
        ),
        certainty="certain",
        ranks=without,
        where=where,
        explains=("numbers/ranks-apart",),
    )

"""A sampler takes another rank's part of the data.

## What it sees
A DistributedSampler whose `rank` is not the rank of the process, or whose number of replicas is not the number of ranks.

## Why it matters
Two ranks get the same part, and the part of another is never seen. A usual cause is `--local_rank`, which torch.distributed.launch used to pass as an argument and torchrun does not: it keeps its default on every rank.

## What to do
Leave `rank=` and `num_replicas=` out, or take them from `dist.get_rank()` and `dist.get_world_size()`; take the local rank from the variable LOCAL_RANK.

## When it is wrong
With tensor or pipeline parallelism several ranks rightly share a part; nothing is said unless a model is wrapped in DistributedDataParallel over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.arguments import find_local_rank_argument
from instep.diagnose.data_facts import loaders_by_key
from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    wrong = [(view, event) for view in run.ranks for event in _wrong_samplers(run, view)]
    if not wrong:
        return
    view, event = wrong[0]
    where = view.site(event.get("sampler_site")) or view.site(event["site"])
    argument = find_local_rank_argument(where)
    ranks = tuple(sorted({one.rank for one, _ in wrong}))
    because = (
        f" `{argument.source}` keeps its default on every rank: torchrun passes no --local_rank." if argument else ""
    )
    yield Finding(
        id="numbers/sampler-rank",
        title=f"on rank {view.rank} the sampler takes the part of rank {event['sampler_rank']} of {event['replicas']}",
        cause=f"The DistributedSampler made at {short(where)} was given rank {event['sampler_rank']} in the process of rank {view.rank}.{because}",
        fix=(
            *((f"read LOCAL_RANK from os.environ instead of the argument at {short(argument)}",) if argument else ()),
            f"leave rank= and num_replicas= out at {short(where)}, or pass dist.get_rank() and dist.get_world_size()",
        ),
        evidence=tuple(
            one.cite(f"sampler of rank {one.rank}: rank={row['sampler_rank']}, num_replicas={row['replicas']}")
            for one, row in wrong[:4]
        ),
        certainty="certain",
        ranks=ranks,
        where=where,
        explains=("numbers/same-data", "numbers/ranks-apart"),
    )


def _wrong_samplers(run: RunView, view: RankView) -> Iterator[Event]:
    models = wraps(view).values()
    if not models or any(len(event["ranks"] or range(run.world_size)) != run.world_size for event in models):
        return
    trained = {event["loader"] for event in view.named("lap") if event["backwards"]}
    for event in loaders_by_key(view).values():
        if event.get("sampler_rank") is None or event["loader"] not in trained or not event.get("shuffles"):
            continue
        if event["sampler_rank"] != view.rank or event["replicas"] != run.world_size:
            yield event

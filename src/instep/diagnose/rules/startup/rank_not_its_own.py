"""A process joins the group under another rank, or with another number of ranks, than it was started with.

## What it sees
`rank=` and `world_size=` of `init_process_group`, beside RANK and WORLD_SIZE of the process.

## Why it matters
Two processes of one rank wait for the others for ever, or both do the work of the same one. A usual cause is `--local_rank`, which
torch.distributed.launch used to pass as an argument and torchrun does not: it keeps its default on every rank.

## What to do
Leave both out: `init_process_group("gloo")` takes them from the variables. Take the local rank from the variable LOCAL_RANK.

## When it is wrong
Scripts that number their processes anew on purpose, each with a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.arguments import find_local_rank_argument
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    joins = [(view, event) for view in run.ranks if (event := view.last("joining")) is not None]
    said = [event["said_rank"] for _, event in joins if event["said_rank"] is not None]
    twice = len(said) > len(set(said))
    wrong = [(view, event) for view, event in joins if _is_wrong(event, twice)]
    if not wrong:
        return
    view, event = wrong[0]
    where = view.site(event["site"])
    argument = find_local_rank_argument(where)
    because = f" `{argument.source}` keeps its default: torchrun passes no such argument." if argument else ""
    yield Finding(
        id="startup/rank-not-its-own",
        title=_title(view, event),
        cause=f"init_process_group at {short(where)} is told what does not fit the process.{because}",
        fix=(
            *((f"read LOCAL_RANK from os.environ instead of the argument at {short(argument)}",) if argument else ()),
            f"leave rank= and world_size= out at {short(where)}",
        ),
        evidence=tuple(
            one.cite(
                f"rank {one.rank} of {row['world_size']} says rank={row['said_rank']}, world_size={row['said_size']}"
            )
            for one, row in joins[:4]
        ),
        certainty="certain",
        ranks=tuple(one.rank for one, _ in wrong),
        where=where,
        explains=("hang/*", "crash/*", "startup/port-in-use"),
    )


def _is_wrong(event: Event, twice: bool) -> bool:
    """A number of its own is a matter of taste; one that another process has too, or a wrong total, is not."""
    rank_differs = event["said_rank"] not in (None, event["rank"]) and twice
    return rank_differs or event["said_size"] not in (None, event["world_size"])


def _title(view: RankView, event: Event) -> str:
    if event["said_rank"] not in (None, event["rank"]):
        return f"the process of rank {view.rank} joins as rank {event['said_rank']}"
    return f"the process of rank {view.rank} expects {event['said_size']} ranks, but {event['world_size']} were started"

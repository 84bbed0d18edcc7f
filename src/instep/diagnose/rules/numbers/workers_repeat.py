"""Every worker of a data loader gives the same samples.

## What it sees
Prints of the batches of an iterable data set that is read by several workers: they come in groups of equal ones, as many as there are workers.

## Why it matters
Each worker has a copy of the data set and goes through all of it, so an epoch holds every sample as often as there are workers, one right after
the other: steps in a row learn from the same batch.

## What to do
Let each worker take its own part: in `__iter__` ask `torch.utils.data.get_worker_info()` for `id` and `num_workers`, and combine them with the rank.

## When it is wrong
Repeating each batch on purpose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from instep.diagnose.data_facts import Key, loader_keys, loaders_by_key
from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event
from instep.records.finding import Finding

MIN_GROUPS = 4
MIN_SHARE = 0.9  # of the groups of one pass


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        for key, event in loaders_by_key(view).items():
            if event["workers"] < 2 or event["length"] is not None:
                continue
            found = _repeats(view, key, event["workers"])
            if found is not None:
                yield _finding(view, event, *found)
                return


def _repeats(view: RankView, key: Key, workers: int) -> tuple[int, int] | None:
    """How many groups of equal batches there are in the first pass, of how many groups."""
    keys = loader_keys(view)
    groups: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for row in view.page.batch_prints() if view.page is not None else ():
        if keys.get(row.loader) == key and row.lap == 1 and any(row.prints):
            groups[(row.index - 1) // workers].append(row.prints)
    whole = [rows for rows in groups.values() if len(rows) == workers]
    equal = [rows for rows in whole if len(set(rows)) == 1]
    varied = len({rows[0] for rows in equal})
    if len(equal) < MIN_GROUPS or len(equal) < MIN_SHARE * len(whole) or varied < len(equal) // 2:
        return None
    return len(equal), len(whole)


def _finding(view: RankView, event: Event, equal: int, groups: int) -> Finding:
    where, workers = view.site(event["site"]), event["workers"]
    return Finding(
        id="numbers/workers-repeat",
        title=f"each batch comes {workers} times: every worker of the loader reads the same samples",
        cause=f"The loader made at {short(where)} has {workers} workers, and {event['dataset']} gives the same stream in each of them.",
        fix=(
            f"in {event['dataset']}.__iter__ take every num_workers-th part from id on, both of torch.utils.data.get_worker_info(), beside the rank's own part",
            f"or pass num_workers=1 at {short(where)}",
        ),
        evidence=(view.cite(f"{equal} of {groups} groups of {workers} batches in a row were equal", "page.bin"),),
        certainty="certain",
        where=where,
    )

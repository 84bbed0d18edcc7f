"""Several ranks train on the same device.

## What it sees
Models of several ranks of one machine on the same GPU, while there are more.

## Why it matters
The ranks share one device's memory and take turns on it; the other devices stand still. A usual cause is a missing
`torch.cuda.set_device(local_rank)`, so that `cuda` means the first device on every rank.

## What to do
Call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first, and use `cuda` or that index from then on.

## When it is wrong
Ranks that share a device on purpose, with MPS or for a test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from instep.diagnose.model_facts import wraps
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    places: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    devices = 0
    for view in run.ranks:
        event = next(iter(wraps(view).values()), None)
        if event is None or not str(event.get("device", "cpu")).startswith("cuda"):
            return
        devices = max(devices, event["device_count"])
        places[(event["host"], event["visible"] or "", event["device"])].append(view.rank)
    shared = [(place, ranks) for place, ranks in places.items() if len(ranks) > 1]
    if not shared or devices < 2:
        return
    (host, _, device), ranks = max(shared, key=lambda row: len(row[1]))
    view = run.by_rank[ranks[0]]
    where = view.site(next(iter(wraps(view).values()))["site"])
    yield Finding(
        id="memory/one-device-for-all",
        title=f"{name_ranks(ranks)} all train on {device} of {host}, which has {devices} devices",
        cause=f"The models wrapped at {short(where)} are on the same device in each of these ranks.",
        fix=('call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the model is made',),
        evidence=tuple(run.by_rank[rank].cite(f"rank {rank}: parameters on {device}") for rank in ranks[:8]),
        certainty="certain",
        ranks=tuple(ranks[1:]),
        where=where,
    )

"""What the ranks' data loaders did, side by side."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.slices import call_at, find_rank_decision
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite

Key = tuple[str, int, int]  # file and line that made a loader, and how many it had made before


@dataclass(frozen=True)
class UnevenLap:
    """A pass over the same loader that ended after different numbers of batches. counts: by rank; running: ranks that
    were still in it; short: the ranks with fewest."""

    key: Key
    lap: int
    counts: dict[int, int]
    running: tuple[int, ...]
    loop: CallSite | None

    @property
    def short_ranks(self) -> tuple[int, ...]:
        fewest = min(self.counts.values())
        return tuple(rank for rank, count in self.counts.items() if count == fewest)

    def __hash__(self) -> int:
        return hash((self.key, self.lap))


def describe_counts(uneven: UnevenLap) -> str:
    parts = [
        f"rank {rank} is in batch {count}" if rank in uneven.running else f"rank {rank} finished its {count} batches"
        for rank, count in sorted(uneven.counts.items())[:8]
    ]
    return f"{', '.join(parts)} of the same pass over the data"


def loader_keys(view: RankView) -> dict[int, Key]:
    """For each loader of a rank the line that made it, which names the same loader on every rank."""
    keys: dict[int, Key] = {}
    counts: dict[tuple[str, int], int] = {}
    for event in view.named("loader"):
        site = view.site(event["site"])
        place = (site.file, site.line) if site else ("", 0)
        keys[event["loader"]] = (place[0], place[1], counts.get(place, 0))
        counts[place] = counts.get(place, 0) + 1
    return keys


def loaders_by_key(view: RankView) -> dict[Key, Event]:
    keys = loader_keys(view)
    return {keys[event["loader"]]: event for event in view.named("loader")}


def laps_by_key(view: RankView) -> dict[tuple[Key, int], Event]:
    keys = loader_keys(view)
    return {(keys[event["loader"]], event["lap"]): event for event in view.named("lap") if event["loader"] in keys}


def find_uneven_lap(run: RunView, loop_line: int | None = None) -> UnevenLap | None:
    """The first pass that some ranks ended, data used up, while others had or got more. Only passes used for training
    count, or those of the loop at this line."""
    laps = {view.rank: laps_by_key(view) for view in run.ranks}
    for place in sorted({place for table in laps.values() for place in table}, key=lambda one: one[1]):
        ended = {rank: table[place] for rank, table in laps.items() if place in table and table[place]["exhausted"]}
        if not ended or not any(_counts(run, rank, event, loop_line) for rank, event in ended.items()):
            continue
        counts = {rank: event["batches"] for rank, event in ended.items()}
        running = {
            view.rank: count
            for view in run.ranks
            if view.rank not in ended and (count := current_count(view, place, ended)) is not None
        }
        if len(set(counts.values())) > 1 or any(count > min(counts.values()) for count in running.values()):
            first = next(iter(ended))
            loop = run.by_rank[first].site(ended[first]["site"])
            return UnevenLap(place[0], place[1], counts | running, tuple(running), loop)
    return None


def _counts(run: RunView, rank: int, event: Event, loop_line: int | None) -> bool:
    site = run.by_rank[rank].site(event["site"])
    return event["backwards"] > 0 if loop_line is None else site is not None and site.line == loop_line


def current_count(view: RankView, place: tuple[Key, int], ended: dict[int, Event]) -> int | None:
    """How many batches a rank has got of a pass that it has not ended."""
    if place[0] not in loader_keys(view).values() or place in laps_by_key(view):
        return None
    for mark in reversed(view.marks):
        if mark.kind == "leave-data":
            return mark.count
    return None


def made_uneven_at(run: RunView, uneven: UnevenLap) -> CallSite | None:
    """The line that gives each rank its own part of the data: what the loader is made of, where it names the rank."""
    file, line, _ = uneven.key
    source = load(file)
    call = call_at(source, line, "DataLoader") if source else None
    if source is None:
        return None
    if call is None:
        return source.site(line) if line else uneven.loop
    for part in _data_arguments(call, _is_split_evenly(run, uneven)):
        chosen = find_rank_decision(source, part, source.function_at(line))
        if chosen is not None:
            return source.site(chosen)
    return source.site(call)


def _is_split_evenly(run: RunView, uneven: UnevenLap) -> bool:
    """Whether a DistributedSampler gives every rank as many samples of the same set, so that the sampler is not to blame."""
    loaders = [loaders_by_key(view).get(uneven.key) for view in run.ranks]
    facts = {(row["length"], row.get("replicas"), row["sampler"]) for row in loaders if row is not None}
    return len(facts) == 1 and next(iter(facts))[1] == run.world_size


def _data_arguments(call: ast.Call, split_evenly: bool) -> Iterator[ast.AST]:
    """What decides about the number of batches, by how seldom it depends on the rank: there it is the cause."""
    words = {word.arg: word.value for word in call.keywords if word.arg}
    yield from (words[name] for name in ("drop_last", "batch_size") if name in words)
    yield from call.args[1:2]
    yield from call.args[:1]
    names = ("dataset", "batch_sampler") if split_evenly else ("dataset", "sampler", "batch_sampler")
    yield from (words[name] for name in names if name in words)


def find_skipped_batches(run: RunView) -> tuple[int, Event] | None:
    """A rank that went through a pass of training and left out some of its batches, while no other rank did; its pass."""
    found: list[tuple[int, Event]] = []
    for view in run.ranks:
        passes = [event for event in view.named("lap") if event["exhausted"] and event["backwards"] > 0]
        found += [(view.rank, event) for event in passes if event["backwards"] < event["batches"]]
    return found[0] if len({rank for rank, _ in found}) == 1 else None

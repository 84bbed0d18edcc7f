"""Which samples the ranks' passes took, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from instep.diagnose.data_facts import Key, laps_by_key, loaders_by_key
from instep.diagnose.model_facts import wraps
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.records.event import Event

MIN_FOLLOWED = 16  # samples of a pass, of those that are followed


@dataclass(frozen=True)
class SharedLoader:
    """A loader that every rank made at the same line over the same data, and the ranks' first whole passes of training
    over it. seen: the followed samples of each rank's pass."""

    key: Key
    loaders: list[Event]
    laps: list[Event]
    seen: list[set[int]]

    @property
    def has_repeats(self) -> bool:
        """Whether a rank drew a sample twice in its pass, as sampling with replacement does."""
        return any(len(seen) < len(lap["seen"]) for seen, lap in zip(self.seen, self.laps))

    @property
    def overlap(self) -> float:
        """Of the smaller of two ranks' parts the share that is in the other as well, for the two that share most."""
        pairs = [(one, two) for index, one in enumerate(self.seen) for two in self.seen[index + 1 :]]
        return max(len(one & two) / min(len(one), len(two)) for one, two in pairs)


def is_data_parallel(run: RunView, view: RankView) -> bool:
    """Whether all ranks train one model, each on data of its own: wrapped or sharded over all ranks."""
    groups = [event["ranks"] or range(run.world_size) for event in wraps(view).values()]
    groups += [range(event["ranks"]) for event in view.named("sharded")]
    return bool(groups) and all(len(group) == run.world_size for group in groups)


def shared_loaders(run: RunView) -> Iterator[SharedLoader]:
    """Loaders of training that are equal on all ranks as far as their data sets tell."""
    if not run.is_whole or run.world_size < 2 or not all(is_data_parallel(run, view) for view in run.ranks):
        return
    tables = [loaders_by_key(view) for view in run.ranks]
    for key in tables[0]:
        rows = [table[key] for table in tables if key in table]
        contents = {row.get("content") for row in rows}
        laps = [lap for view in run.ranks if (lap := _first_whole(view, key)) is not None]
        if len(rows) < len(tables) or len(laps) < len(tables) or len(contents) != 1 or None in contents:
            continue
        seen = [set(lap["seen"]) for lap in laps]
        if min(map(len, seen)) >= MIN_FOLLOWED:
            yield SharedLoader(key, rows, laps, seen)


def _first_whole(view: RankView, key: Key) -> Event | None:
    laps = [lap for (place, _), lap in laps_by_key(view).items() if place == key]
    return next((lap for lap in laps if lap["exhausted"] and lap["backwards"] and lap.get("seen")), None)


def keeps_its_part(run: RunView, shared: SharedLoader) -> bool:
    """Whether the ranks' parts stay what they are: of a subset, or equal in every pass."""
    if all(row["subset"] is not None for row in shared.loaders):
        return True
    rows = [
        [set(lap["seen"]) for (place, _), lap in laps_by_key(view).items() if place == shared.key and lap.get("seen")]
        for view in run.ranks
    ]
    return all(len(parts) > 1 and all(part == parts[0] for part in parts) for parts in rows)

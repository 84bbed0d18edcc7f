"""Waiting for the other ranks, and noticing when they wait for something else.

A rank that waits longer than PATIENCE writes down in the store what it waits for, and with which ranks. When every rank
has written and no group of them waits for the same thing, no one will ever come: each raises RanksDisagree with the
lines of all. Nothing is written on the usual path.
"""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from instep.errors import RanksDisagree
from instep.train.call_site import at_line

PATIENCE = timedelta(seconds=5)  # far above any skew between healthy ranks that costs nothing to look at
SOON = timedelta(seconds=1)  # once others may be waiting as well
MOST_LOOKS_SOON = 10  # then it is one that is late, and each look asks the store about every rank
CONFIRM_SECONDS = 0.5  # a rank on its way out of a wait has this long to take its note back


class Meeting:
    """The collectives that a run makes beside its gradients: tagged, in one order, with a guard against deadlock.

    members: the group's ranks among all `world_size` ranks, where it is only a part of them.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup,
        members: Sequence[int] | None = None,
        world_size: int | None = None,
    ) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.store = _default_store()
        self._members = list(range(size) if members is None else members)
        self._world_size = size if world_size is None else world_size

    def wait(self, handle: Any, what: str) -> None:
        """Waits for an asynchronous collective. what: what the ranks have to agree on, as `step.update() of step 3`."""
        looks = 0
        while True:
            try:
                handle.wait(SOON if 0 < looks <= MOST_LOOKS_SOON else PATIENCE)
                break
            except RuntimeError as error:
                if "timed out" not in str(error).lower() or handle.is_completed():
                    raise
            self._post(what)
            looks += 1
            self._check()
        if looks:
            self.store.set(self._key(self._members[self.rank]), "")

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value in rank order. Raises RanksDisagree where ranks came for different things."""
        note = what + at_line()
        data = torch.frombuffer(bytearray(pickle.dumps((what, note, value))), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        self.wait(dist.all_gather(sizes, torch.tensor([data.numel()]), group=self.group, async_op=True), note)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self.wait(dist.all_gather(parts, padded, group=self.group, async_op=True), note)
        found = [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes)]
        whats, notes, values = zip(*found)
        if len(set(whats)) > 1:
            raise RanksDisagree(describe_conflict(list(notes), list(whats)))
        return list(values)

    def leave(self, why: str) -> None:
        """Notes that this rank will come to no further collective. Waits for no one."""
        try:
            self._post(why, ())
        except (RuntimeError, dist.DistError):  # the store may have gone with the rank that held it
            return

    def _post(self, what: str, members: Sequence[int] | None = None) -> None:
        note = [what, self._members if members is None else list(members)]
        self.store.set(self._key(self._members[self.rank]), json.dumps(note))

    def _check(self) -> None:
        notes = self._notes()
        if notes is None or can_go_on(notes):
            return
        time.sleep(CONFIRM_SECONDS)
        if self._notes() == notes:
            texts = [what for what, _ in notes]
            raise RanksDisagree(describe_conflict(texts, [_without_line(text) for text in texts]))

    def _notes(self) -> list[tuple[str, list[int]]] | None:
        """What each rank of the run waits for and with whom, or None while one of them is at work."""
        keys = [self._key(rank) for rank in range(self._world_size)]
        if not all(self.store.check([key]) for key in keys):
            return None
        texts = [self.store.get(key).decode() for key in keys]
        return [tuple(json.loads(text)) for text in texts] if all(texts) else None

    def _key(self, rank: int) -> str:
        return f"instep/waits/{rank}"


def can_go_on(notes: Sequence[tuple[str, Sequence[int]]]) -> bool:
    """Whether all members of some group wait for the same thing, so that it is only slow."""
    return any(
        members and all(list(notes[m][1]) == list(members) and _same(notes[m][0], what) for m in members)
        for what, members in notes
    )


def _same(first: str, second: str) -> bool:
    return _without_line(first) == _without_line(second)


def describe_conflict(notes: list[str], kinds: list[str]) -> str:
    """One sentence that names the odd ranks and where each is."""
    usual = Counter(kinds).most_common(1)[0][0]
    parts = []
    for kind in sorted(set(kinds), key=lambda kind: kind == usual):
        ranks = [rank for rank, other in enumerate(kinds) if other == kind]
        word = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{word} {', '.join(map(str, ranks))} came to {notes[ranks[0]]}")
    return (
        f"The ranks wait for each other: {'; '.join(parts)}. Every rank has to make the same calls in the same order."
    )


def _without_line(note: str) -> str:
    return note.rpartition(" at ")[0] if " at " in note else note


def _default_store() -> dist.Store:
    """The store that the ranks met through. Private in torch, so only here (a test notices a change)."""
    get: Callable[[], dist.Store] = dist.distributed_c10d._get_default_store
    return get()

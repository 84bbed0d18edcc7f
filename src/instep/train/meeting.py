"""Waiting for the other ranks, and noticing when they wait for something else.

A rank that waits longer than PATIENCE writes down in the store what it waits for. When every rank has written and they
do not wait for the same thing, no one will ever come: each raises RanksDisagree with the lines of all. Nothing is
written on the usual path.
"""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from instep.errors import RanksDisagree
from instep.train.call_site import at_line

PATIENCE = timedelta(seconds=5)  # far above any skew between healthy ranks that costs nothing to look at
CONFIRM_SECONDS = 0.5  # a rank on its way out of a wait has this long to take its note back


class Meeting:
    """The collectives that a run makes beside its gradients: tagged, in one order, with a guard against deadlock."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.store = _default_store()

    def wait(self, handle: Any, what: str) -> None:
        """Waits for an asynchronous collective. what: what the ranks have to agree on, as `step.update() of step 3`."""
        posted = False
        while True:
            try:
                handle.wait(PATIENCE)
                break
            except RuntimeError as error:
                if "timed out" not in str(error).lower() or handle.is_completed():
                    raise
            self._post(what)
            posted = True
            self._check()
        if posted:
            self.store.set(self._key(self.rank), "")

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
            self._post(why)
        except (RuntimeError, dist.DistError):  # the store may have gone with the rank that held it
            return

    def _post(self, what: str) -> None:
        self.store.set(self._key(self.rank), json.dumps(what))

    def _check(self) -> None:
        notes = self._notes()
        if notes is None or len({_without_line(note) for note in notes}) == 1:
            return
        time.sleep(CONFIRM_SECONDS)
        if self._notes() == notes:
            raise RanksDisagree(describe_conflict(notes, [_without_line(note) for note in notes]))

    def _notes(self) -> list[str] | None:
        keys = [self._key(rank) for rank in range(self.size)]
        if not all(self.store.check([key]) for key in keys):
            return None
        texts = [self.store.get(key).decode() for key in keys]
        return [json.loads(text) for text in texts] if all(texts) else None

    def _key(self, rank: int) -> str:
        return f"instep/waits/{rank}"


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

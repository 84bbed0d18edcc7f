"""How the background parts of a save agree over ranks.

Through the store that the ranks met at, not by collectives: a background thread must not share a process group with
training, would leave a collective pending that is none of the user's, and could not be given up when a rank is lost.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Protocol

from instep.train.world import World

LONGEST_PAUSE_SECONDS = 0.2


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class GivenUp(Exception):
    """The save was abandoned while waiting for other ranks."""


class Agreement:
    """Messages of one save. name: the same on all ranks, and new for each save."""

    def __init__(self, world: World, store: Store | None, name: str) -> None:
        self._world, self._store, self._name = world, store, name
        self.given_up = threading.Event()

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value on rank 0, None elsewhere. Raises GivenUp, or RuntimeError when the store is lost."""
        if self._store is None:
            return [value]
        self._store.set(self._key(self._world.rank), json.dumps(value))
        if not self._world.is_main:
            return None
        keys = [self._key(rank) for rank in range(self._world.size)]
        self._wait(keys)
        values = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self._store is None:
            return value
        key = self._key("result")
        if self._world.is_main:
            self._store.set(key, json.dumps(value))
            return value
        self._wait([key])
        result = json.loads(self._store.get(key))
        if self._store.add(self._key("readers"), 1) == self._world.size - 1:
            self._store.delete_key(key)
            self._store.delete_key(self._key("readers"))
        return result

    def _wait(self, keys: list[str]) -> None:
        pause = 0.002
        while not self._store.check(keys):  # type: ignore[union-attr]
            if self.given_up.is_set():
                raise GivenUp
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)

    def _key(self, who: object) -> str:
        return f"{self._name}/{who}"


def open_store(world: World) -> Store | None:
    """A connection of its own to the store of the world's group; None on one process."""
    if world.meeting is None:
        return None
    store = world.meeting.store
    try:
        return store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in torch's type stubs
    except (AttributeError, RuntimeError, NotImplementedError):  # file stores: every access opens the file anyway
        return store

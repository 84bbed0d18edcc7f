"""What the agents of several nodes tell each other over their rendezvous' store: that they live, who failed first, and
where the launchers find each other.

torch's agents do not watch each other: when a machine is lost, the ranks of the others wait for half an hour. Here each
agent writes a beat and reads those of the others, in a thread of its own with a connection of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

BEAT_SECONDS = 2.0
LOST_SECONDS = 30.0  # a busy machine may be silent for some seconds; half an hour is what is saved
_LINK_SECONDS = 0.1  # between two looks, until the launchers know of each other
_WORD_SECONDS = 3.0  # for the failing node to tell of its rank


class Peers:
    """The other nodes of one attempt. on_lost is called once, from another thread, with a sentence; on_link with where
    the launcher of the first node listens; link: the same on that node, to be told."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        on_lost: Callable[[str], None],
        on_link: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.store: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stubs
        self.rank = rank
        self.size = size
        self.on_lost = on_lost
        self.on_link = on_link
        self.link = ""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="instep-peers", daemon=True)

    def start(self) -> None:
        if self.size > 1:
            self.thread.start()

    def stop(self) -> None:
        self.ended.set()

    def _beat(self) -> None:
        others = (peer for peer in range(self.size) if peer != self.rank)
        heard: dict[int, tuple[bytes, float]] = dict.fromkeys(others, (b"", time.monotonic()))
        store_answers_at = time.monotonic()
        count = 0
        is_linked = False
        while not self.ended.wait(BEAT_SECONDS if is_linked else _LINK_SECONDS):
            count += 1
            try:
                is_linked = is_linked or self._pass_link_on()
                self.store.set(f"instep/beat/{self.rank}", str(count))
                for peer, (beat, _) in heard.items():
                    key = f"instep/beat/{peer}"
                    now_beat = bytes(self.store.get(key)) if self.store.check([key]) else b""
                    if now_beat != beat:
                        heard[peer] = (now_beat, time.monotonic())
                store_answers_at = time.monotonic()
            except RuntimeError:  # every error of the store is one; the node that holds it may be gone
                pass
            lost = find_lost({peer: at for peer, (_, at) in heard.items()}, store_answers_at, time.monotonic())
            if lost and not self.ended.is_set():
                self.on_lost(lost)
                return

    def _pass_link_on(self) -> bool:
        """Whether the others can know where the first launcher listens, or ours knows. Raises RuntimeError."""
        key = "instep/link"
        if self.rank == 0 and self.link:
            self.store.set(key, self.link)
            return True
        if self.rank > 0 and self.store.check([key]):
            self.on_link(bytes(self.store.get(key)).decode(errors="replace"))
            return True
        return False

    def tell_guilty(self, text: str) -> None:
        """For the other nodes: which rank of ours failed by a fault of its own."""
        try:
            self.store.set("instep/guilty", text)
        except RuntimeError:  # the store is gone with its node; then nobody can read it either
            return

    def ask_guilty(self) -> str:
        """Which rank of another node failed first, when it tells in time; an empty text otherwise."""
        deadline = time.monotonic() + _WORD_SECONDS
        key = "instep/guilty"
        while time.monotonic() < deadline:
            try:
                if self.store.check([key]):
                    return bytes(self.store.get(key)).decode(errors="replace")
            except RuntimeError:
                return ""
            time.sleep(0.1)
        return ""


def find_lost(heard_at: dict[int, float], store_answers_at: float, now: float) -> str:
    """A sentence on a node that has been silent for too long, or an empty text.

    While the store does not answer nobody can be heard, so that silence is blamed on the store's node alone.
    """
    if now - store_answers_at > LOST_SECONDS:
        return f"the node that holds the rendezvous has not answered for {now - store_answers_at:.0f} s; it is lost"
    silent = [peer for peer, at in heard_at.items() if now - at > LOST_SECONDS]
    if not silent:
        return ""
    names = " and ".join(f"node {peer}" for peer in silent)
    return f"{names} (by group rank) has not been heard of for {LOST_SECONDS:.0f} s; it is lost"

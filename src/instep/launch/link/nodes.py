"""The launchers of one run on several nodes: who is there, what they say, who is lost.

The first node (group rank 0) holds a connection to each other one; it gathers what is known of all ranks, so that there
is one report. Every node beats and listens. Without a connection (a firewall between) each node reports for itself.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from instep.launch.link.connection import Connection
from instep.launch.link.lost import FOR_GOOD, Loss, describe_loss, find_interface, is_down, judge_silence, name_node
from instep.launch.link.meeting_point import MeetingPoint, come
from instep.launch.link.wire import Refused
from instep.records.run_dir import RunDir, keep_json

_COME_SECONDS = 15.0  # of trying to reach the first node, before it is said; the trying goes on
_AGAIN_SECONDS = 1.0

Message = dict[str, Any]


@dataclass
class Peer:
    """Another node. clock: our monotonic clock minus its own; gone: why it is no longer there, or silent."""

    node: int
    host: str
    ranks: tuple[int, ...]
    connection: Connection
    run_dir: str = ""
    clock: float = 0.0
    interface: str = ""
    gone: Loss | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # the newest message of each kind


class Nodes:
    """Belongs to the launcher's loop; only the queue is shared with the threads of the connections."""

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self.say = say
        self.host = socket.gethostname()
        self.node, self.size = 0, 1
        self.ranks: tuple[int, ...] = ()
        self.world_size = 1
        self.peers: dict[int, Peer] = {}
        self.handlers: dict[str, Callable[[Peer, Message], None]] = {"lost": self._note_lost_elsewhere}
        self.has_news = False  # a node fell silent, or came back: to be judged anew
        self.shares_folder = False  # with the first node, which then writes what is of all ranks
        self.has_lost = False  # a node of this attempt is gone for good
        self.host_of_first = self._token = self._told = ""
        self.unreachable = ""
        self._point: MeetingPoint | None = None
        self._inbox: queue.SimpleQueue[tuple[Connection, Message]] = queue.SimpleQueue()
        self._connections: list[Connection] = []  # those of strangers who knew the token included
        self._closing = threading.Event()

    @property
    def is_first(self) -> bool:
        return self.node == 0

    @property
    def present(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.connection.end is None]

    @property
    def is_whole(self) -> bool:
        """Whether every other node that this one hears of is there: on the first all of them, else the first."""
        wanted = self.size - 1 if self.is_first else min(1, self.size - 1)
        return len(self.present) >= wanted and not any(peer.gone for peer in self.peers.values())

    def join(self, variables: dict[str, str], ranks: tuple[int, ...]) -> str:
        """At the start of each attempt. Returns what the others have to know to come here; empty where they need not."""
        self._leave("again")
        self._closing = threading.Event()
        self.has_news = self.has_lost = False
        self.node, self.size = int(variables["GROUP_RANK"]), int(variables["GROUP_WORLD_SIZE"])
        self.ranks, self.world_size = ranks, int(variables["WORLD_SIZE"])
        self.host_of_first = variables["MASTER_ADDR"]
        if self.size < 2:
            return ""
        self._token = secrets.token_hex(8)
        self.shares_folder = False
        if not self.is_first:
            self._leave_mark()
            return ""
        self.write()
        if self._point is None:
            try:
                self._point = MeetingPoint(self.host_of_first, self._arrive, self._hear)
            except OSError as error:
                self.say(f"nodes do not share what they see: {error.strerror or error}; each reports its own ranks")
                return ""
        return json.dumps({"port": self._point.port, "token": self._point.token})

    def _leave_mark(self) -> None:
        """By which the first node sees that its run directory is the same one."""
        with contextlib.suppress(OSError):
            self.run_dir.node_mark(self._token).touch()

    def found(self, text: str) -> None:
        """Where the first node listens, as the store told."""
        self._told = text
        if self.is_first or self.peers:
            return
        told = json.loads(text)
        hello = self._hello() | {"token": told["token"]}
        args = (self.host_of_first, int(told["port"]), hello, self._closing)
        threading.Thread(target=self._come, args=args, name="instep-link", daemon=True).start()

    def _hello(self) -> Message:
        return {
            "do": "hello",
            "node": self.node,
            "host": self.host,
            "ranks": self.ranks,
            "run_dir": str(self.run_dir.root),
            "mark": self._token,
            "clock": time.monotonic(),
        }

    def _come(self, host: str, port: int, hello: Message, closing: threading.Event) -> None:
        begun = time.monotonic()
        while not closing.is_set():
            try:
                connection = come(host, port, hello | {"clock": time.monotonic()}, self._hear)
            except OSError as error:
                if time.monotonic() - begun > _COME_SECONDS and not self.unreachable:
                    self.unreachable = f"{host}:{port} cannot be reached ({error.strerror or error})"
                closing.wait(_AGAIN_SECONDS)
                continue
            self._connections.append(connection)
            connection.start()
            if closing.is_set():
                connection.refuse("parted")
            return

    def _arrive(self, connection: Connection, hello: Message) -> None:
        mark = str(hello.get("mark", ""))
        shares = mark.isalnum() and self.run_dir.node_mark(mark).exists()
        self._connections.append(connection)
        self._inbox.put((connection, hello))
        connection.send(self._hello() | {"shares": shares})
        connection.start()

    def _hear(self, connection: Connection, message: Message) -> None:
        self._inbox.put((connection, message))

    def tick(self, now: float) -> None:
        """Takes what has come, and looks who is still there. now: monotonic."""
        while True:
            try:
                connection, message = self._inbox.get_nowait()
            except queue.Empty:
                break
            try:
                self._take(connection, message)
            except (Refused, KeyError, TypeError, ValueError, AttributeError) as error:
                connection.refuse(f"it sent what cannot be read ({error})")
        if self.unreachable:
            self.say(f"nodes do not share what they see: {self.unreachable}; each reports its own ranks")
            self.unreachable = ""
        for peer in list(self.peers.values()):
            self._look_at(peer, now)
            if peer.connection.end == "again" and not self.is_first:
                del self.peers[peer.node]
                peer.connection.close()
                self.found(self._told)

    def _take(self, connection: Connection, message: Message) -> None:
        do = message["do"]
        if do == "hello":
            self._greet(connection, message)
        else:
            peer = self.peers.get(-1 if connection.node is None else connection.node)
            if peer is None or peer.connection is not connection:
                raise Refused("a message before its hello")
            peer.facts[do] = message
            if do in self.handlers:
                self.handlers[do](peer, message)

    def _greet(self, connection: Connection, hello: Message) -> None:
        node, ranks = int(hello["node"]), tuple(int(rank) for rank in hello["ranks"])
        taken = {rank for peer in self.peers.values() if peer.node != node for rank in peer.ranks} | set(self.ranks)
        allowed = node == 0 if not self.is_first else 0 < node < self.size
        if not allowed or taken & set(ranks) or not all(0 <= rank < self.world_size for rank in ranks):
            connection.part("again")  # of another attempt than ours: it has to come again, or we have to go on first
            return
        before = self.peers.get(node)
        if before is not None and before.connection is not connection:
            before.connection.refuse("it came again")
        connection.node = node
        self.shares_folder = not self.is_first and hello.get("shares") is True
        clock = time.monotonic() - float(hello["clock"])
        address = connection.channel.getsockname()[0]
        self.peers[node] = Peer(
            node, str(hello["host"])[:255], ranks, connection, str(hello["run_dir"]), clock, find_interface(address)
        )
        self.write()

    def _look_at(self, peer: Peer, now: float) -> None:
        how = judge_silence(peer.connection.end, peer.connection.heard_at, now)
        before = peer.gone.how if peer.gone else ""
        if how == before or before in FOR_GOOD:
            return
        if how == "left" and "ended" in peer.facts:
            return  # it has told how its ranks ended, and went
        name = name_node(peer.node, peer.host)
        if not how:
            self.say(f"{name} is heard again")
            peer.gone = None
        else:
            interface = peer.interface if is_down(peer.interface) else ""
            peer.gone = Loss(how, round(now - peer.connection.heard_at, 1), peer.connection.end or "", interface)
            self.say(describe_loss(name, peer.gone))
            self._tell_others(peer)
        self.has_news = True
        self.has_lost = self.has_lost or how in FOR_GOOD
        self.write()

    def _tell_others(self, peer: Peer) -> None:
        assert peer.gone is not None
        if self.is_first:
            self.send(
                {"do": "lost", "node": peer.node, "host": peer.host, "ranks": peer.ranks, "loss": vars(peer.gone)}
            )

    def _note_lost_elsewhere(self, peer: Peer, message: Message) -> None:
        """The first node has lost another one."""
        loss = Loss(**message["loss"])
        self.say(describe_loss(name_node(int(message["node"]), str(message["host"])), loss))
        self.has_news = True
        self.has_lost = self.has_lost or loss.how in FOR_GOOD
        self.write()

    def take_news(self) -> bool:
        news, self.has_news = self.has_news, False
        return news

    def send(self, message: Message) -> None:
        """To every node that is there."""
        for peer in self.present:
            peer.connection.send(message)

    def write(self) -> None:
        """What is known of the nodes, for diagnosis."""
        if self.shares_folder:
            return
        rows = [self._row(peer) for peer in self.peers.values()]
        others = [peer.facts["lost"] for peer in self.peers.values() if "lost" in peer.facts]
        rows += [
            {"node": one["node"], "host": one["host"], "ranks": one["ranks"], "gone": one["loss"]} for one in others
        ]
        own = {"node": self.node, "host": self.host, "ranks": self.ranks, "gone": None}
        nodes = sorted([own, *rows], key=lambda row: row["node"])
        keep_json(self.run_dir.nodes, {"node": self.node, "size": self.size, "nodes": nodes})

    def _row(self, peer: Peer) -> dict[str, Any]:
        gone = vars(peer.gone) if peer.gone is not None else None
        exits = peer.facts.get("ended", {}).get("exits", {})
        living = [] if gone or "ended" in peer.facts else list(peer.ranks)
        return {
            "node": peer.node,
            "host": peer.host,
            "ranks": peer.ranks,
            "clock": peer.clock,
            "living": living,
            "exits": exits,
            "gone": gone,
        }

    def _leave(self, word: str) -> None:
        """Parts from the others; the meeting point stays for the next attempt."""
        self._closing.set()
        for connection in self._connections:
            connection.part(word)
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self.peers.clear()
        with contextlib.suppress(OSError):
            self.run_dir.node_mark(self._token).unlink(missing_ok=True)

    def close(self) -> None:
        self._leave("bye")
        if self._point is not None:
            self._point.close()
            self._point = None

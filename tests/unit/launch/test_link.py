"""What launchers of several nodes say to each other: over sockets of this process, and refused where it is not theirs."""

from __future__ import annotations

import base64
import json
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.launch.judge_stall import Sight
from instep.launch.link.lost import Loss, describe_loss, find_interface, judge_silence
from instep.launch.link.nodes import Nodes
from instep.launch.link.sharing import Sharing
from instep.launch.link.wire import MOST_FILE_BYTES, LineReader, Refused, pack_file, rank_file, unpack_file
from instep.records.run_dir import RunDir

VARIABLES = {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


class Pair:
    """The launchers of two nodes, each with one rank."""

    def __init__(self, folder: Path, other: Path) -> None:
        self.said: list[str] = []
        self.first, self.second = (Nodes(RunDir(path), self.said.append) for path in (folder, other))
        self.sharing = Sharing(self.first), Sharing(self.second)
        self.told = self.first.join(VARIABLES | {"GROUP_RANK": "0"}, (0,))
        self.second.join(VARIABLES | {"GROUP_RANK": "1"}, (1,))

    def meet(self) -> None:
        self.second.found(self.told)
        self.until(lambda: self.first.is_whole and self.second.is_whole)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            self.first.tick(time.monotonic())
            self.second.tick(time.monotonic())
            time.sleep(0.005)

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    both = Pair(tmp_path / "a", tmp_path / "b")
    yield both
    both.close()


def test_the_first_node_knows_how_far_the_ranks_of_others_are(pair: Pair) -> None:
    pair.meet()
    now = time.monotonic()
    pair.sharing[1].tell_sights([Sight(1, True, now - 5.0, ("barrier", 3), "idle", 1.5)], now)
    pair.until(lambda: pair.sharing[0].sights(now) is not None)
    (sight,) = pair.sharing[0].sights(now) or []
    assert (sight.rank, sight.waits_in, sight.own_work, sight.longest_pause) == (1, ("barrier", 3), "idle", 1.5)
    assert sight.progressed_at == pytest.approx(now - 5.0, abs=1.0)
    assert pair.sharing[0].sights(now + 60) is None  # too old to judge by


def test_files_of_other_nodes_come_to_the_first_with_their_answer(pair: Pair) -> None:
    pair.meet()
    events = pair.second.run_dir.rank(1).events
    events.parent.mkdir()
    events.write_text('{"event": "start"}\n')
    pair.sharing[0].ask(4)
    pair.until(lambda: pair.sharing[1].asked == 4)
    pair.sharing[1].answer(4, [{"rank": 1, "state": "S"}])
    pair.until(lambda: pair.sharing[0].have_answered(4))
    assert pair.first.run_dir.rank(1).events.read_text() == events.read_text()
    assert pair.sharing[0].rows(4) == [{"rank": 1, "state": "S"}]


def test_the_report_of_the_first_node_reaches_the_others(pair: Pair) -> None:
    pair.meet()
    pair.sharing[1].exchange_ends({"1": {"code": 3, "ended_at": 1.0, "by_us": False}}, {"id": "crash/signal"})
    pair.sharing[0].exchange_ends({}, None)
    assert pair.sharing[0].crashes() == [{"id": "crash/signal"}]
    pair.sharing[0].tell_report([{"id": "hang/x"}])
    assert pair.sharing[1].await_report() == [{"id": "hang/x"}]
    row = json.loads(pair.first.run_dir.nodes.read_text())["nodes"][1]
    assert row["exits"]["1"]["code"] == 3 and row["living"] == [] and row["gone"] is None


def test_a_launcher_that_dies_is_noticed_at_once(pair: Pair) -> None:
    pair.meet()
    pair.second.peers[0].connection.refuse("killed")  # as the kernel does for a process that is gone
    pair.until(lambda: pair.first.has_lost)
    assert any(text.startswith("node 1 (") and "is lost" in text for text in pair.said), pair.said
    row = json.loads(pair.first.run_dir.nodes.read_text())["nodes"][1]
    assert row["gone"]["how"] == "closed" and row["living"] == []


def test_a_node_that_parts_after_its_ranks_have_ended_is_not_lost(pair: Pair) -> None:
    pair.meet()
    pair.sharing[1].exchange_ends({"1": {"code": 0, "ended_at": 1.0, "by_us": False}}, None)
    pair.until(lambda: "ended" in pair.first.peers[1].facts)
    pair.second.close()
    pair.until(lambda: pair.first.peers[1].connection.end == "bye")
    pair.first.tick(time.monotonic())
    assert not pair.first.has_lost and pair.first.peers[1].gone is None


def test_one_folder_for_both_nodes_is_seen(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tmp_path)
    try:
        pair.meet()
        assert pair.second.shares_folder and not pair.first.shares_folder
    finally:
        pair.close()
    assert [path.name for path in tmp_path.iterdir()] == ["nodes.json"]


@pytest.mark.parametrize(
    "hello",
    [
        {"do": "hello", "token": "wrong", "node": 1, "host": "x", "ranks": [1], "run_dir": "", "clock": 0.0},
        {"do": "sights", "ranks": []},
        {"do": "hello"},
    ],
)
def test_a_stranger_is_not_let_in(pair: Pair, hello: dict[str, Any]) -> None:
    with socket.create_connection(("127.0.0.1", json.loads(pair.told)["port"])) as stranger:
        stranger.sendall(json.dumps(hello).encode() + b"\n")
        stranger.settimeout(5)
        assert stranger.recv(100) == b""
    pair.first.tick(time.monotonic())
    assert pair.first.peers == {}


def test_a_file_of_a_rank_that_is_elsewhere_ends_the_connection(pair: Pair) -> None:
    pair.meet()
    pair.second.send(
        {"do": "file", "rank": 0, "name": "events", "data": base64.b64encode(zlib.compress(b"x")).decode()}
    )
    pair.until(lambda: pair.first.peers[1].connection.end is not None)
    end = pair.first.peers[1].connection.end
    assert end == "it sent what cannot be read (a file of rank 0, which is not on node 1)"
    assert not pair.first.run_dir.rank(0).events.exists()


def test_lines_are_put_together_and_limited() -> None:
    reader = LineReader(most_bytes=40)
    assert reader.feed(b'{"do": "be') == []
    assert reader.feed(b'at"}\n{"do": "x"}\n{') == [{"do": "beat"}, {"do": "x"}]
    with pytest.raises(Refused, match="a line of more than 40 bytes"):
        reader.feed(b"x" * 41)


@pytest.mark.parametrize("line", [b"[1]\n", b"pickle\n", b'{"x": 1}\n', b"[" * 30000 + b"\n"])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(Refused):
        LineReader().feed(line)


def test_files_have_fixed_names_and_sizes(tmp_path: Path) -> None:
    bomb = base64.b64encode(zlib.compress(bytes(MOST_FILE_BYTES + 1))).decode()
    with pytest.raises(Refused, match="a file of more than"):
        unpack_file(bomb)
    with pytest.raises(Refused, match=r"a file named '\.\./x'"):
        rank_file(RunDir(tmp_path).rank(0), "../x")
    (tmp_path / "long").write_bytes(b"first\n" + b"y" * MOST_FILE_BYTES + b"\nlast\n")
    packed = pack_file(tmp_path / "long")
    assert packed is not None and unpack_file(packed) == b"last\n"
    assert pack_file(tmp_path / "none") is None


def test_silence_is_judged_by_its_length() -> None:
    assert [judge_silence(None, 0.0, now) for now in (5.0, 9.0, 31.0)] == ["", "silent", "lost"]
    assert judge_silence("bye", 0.0, 1.0) == "left"
    assert judge_silence("Connection reset by peer", 0.0, 1.0) == "closed"
    text = describe_loss("node 1 (a)", Loss("silent", 9.0, "", "eth0"))
    assert text == "node 1 (a) has not been heard of for 9 s; eth0, the interface to it, is down"


def test_the_interface_of_an_address_is_found() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.9") == ""

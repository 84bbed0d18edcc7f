"""What is said of a node that is no longer heard of, from the launcher's notes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from instep.diagnose.engine import diagnose
from instep.records.finding import Finding


def find(folder: Path, gone: dict[str, Any] | None, **facts: Any) -> list[Finding]:
    nodes = [
        {"node": 0, "host": "a", "ranks": [0, 1], "gone": None},
        {"node": 1, "host": "b", "ranks": [2, 3], "clock": 0.0, "living": [], "gone": gone, **facts},
    ]
    (folder / "nodes.json").write_text(json.dumps({"node": 0, "size": 2, "nodes": nodes}))
    return diagnose(folder)


def gone(how: str, interface: str = "") -> dict[str, Any]:
    return {"how": how, "seconds": 8.2, "why": "", "interface": interface}


def test_a_silent_node_is_likely_lost(tmp_path: Path) -> None:
    (found,) = find(tmp_path, gone("silent"))
    assert (found.id, found.certainty, found.ranks) == ("hang/node-lost", "likely", (2, 3))
    assert found.title == "node 1 (b, ranks 2 and 3) has not been heard of for 8 s"
    assert found.fix[0] == "see whether b lives and can be reached: ping b"


def test_an_interface_that_is_down_is_certain(tmp_path: Path) -> None:
    (found,) = find(tmp_path, gone("silent", "eth0"))
    assert found.certainty == "certain"
    assert found.cause == "The network interface eth0, over which the nodes speak, is down on this machine."


def test_a_launcher_that_died_is_certain(tmp_path: Path) -> None:
    (found,) = find(tmp_path, gone("closed"))
    assert found.certainty == "certain"
    assert found.title == "node 1 (b, ranks 2 and 3) is lost: its launcher has died"


def test_a_node_whose_ranks_had_ended_well_is_not_missed(tmp_path: Path) -> None:
    exits = {str(rank): {"code": 0, "ended_at": 1.0, "by_us": False} for rank in (2, 3)}
    assert find(tmp_path, gone("closed"), exits=exits) == []


def test_nodes_that_are_there_are_not_spoken_of(tmp_path: Path) -> None:
    assert find(tmp_path, None) == []

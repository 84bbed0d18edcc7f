"""The files of ranks on other nodes, brought to the first one, where all of them are judged together."""

from __future__ import annotations

import contextlib
from typing import Any

from instep.launch.link.nodes import Nodes, Peer
from instep.launch.link.wire import RANK_FILES, Refused, pack_file, rank_file, unpack_file
from instep.records.run_dir import RunDir


def send_rank_files(nodes: Nodes) -> None:
    """All that diagnosis reads of this node's ranks, to the first node."""
    for rank in nodes.ranks if not nodes.shares_folder else ():
        for name in RANK_FILES:
            data = pack_file(rank_file(nodes.run_dir.rank(rank), name))
            if data is not None:
                nodes.send({"do": "file", "rank": rank, "name": name, "data": data})


def keep_rank_file(run_dir: RunDir, peer: Peer, message: dict[str, Any]) -> None:
    """Raises Refused for a rank that is not of that node, or a name that is none of ours."""
    rank = int(message["rank"])
    if rank not in peer.ranks:
        raise Refused(f"a file of rank {rank}, which is not on node {peer.node}")
    path, data = rank_file(run_dir.rank(rank), str(message["name"])), unpack_file(message["data"])
    with contextlib.suppress(OSError):  # a full disk costs the file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

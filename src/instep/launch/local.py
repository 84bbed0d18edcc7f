"""A run on this machine alone: ranks, their addresses and the store in which they meet, without torch's agent."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from typing import Any

from instep.errors import UsageError
from instep.launch.channel import open_channel
from instep.launch.spawn import Zygote, listen
from instep.launch.watch import PlaceRanks
from instep.launch.worker_env import local_variables, our_variables
from instep.records.launch_spec import LaunchSpec, RankPlace


def needs_agent(options: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether only torch's elastic agent can do what is asked: several nodes, or a rendezvous of the user's choice."""
    most_nodes = str(options["nnodes"]).rpartition(":")[2]
    if options["standalone"]:
        return options["logs_specs"] is not None or options["event_log_handler"] != "null"
    return (
        most_nodes != "1"
        or options["rdzv_backend"] != "static"
        or bool(options["rdzv_endpoint"] or options["rdzv_conf"])
        or options["logs_specs"] is not None
        or options["event_log_handler"] != "null"
        or environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
        or "TORCHELASTIC_HEALTH_CHECK_PORT" in environ
    )


def open_store(options: Mapping[str, Any]) -> tuple[socket.socket, tuple[str, int]]:
    """A listening socket for the store and the address that ranks are told. Raises UsageError for a port in use."""
    if options["standalone"] or options["master_port"] is None:
        server = listen("127.0.0.1", 0)
        return server, ("localhost", server.getsockname()[1])
    host, port = options["master_addr"], options["master_port"]
    try:
        return listen("0.0.0.0" if host not in ("localhost", "127.0.0.1") else "127.0.0.1", port), (host, port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--master-port {port} cannot be used on this machine: {getattr(error, 'strerror', None) or error}. "
            "Leave it out (a free port is found then), or choose another."
        ) from error


def start_store(zygote: Zygote, server: socket.socket, log: int, num_ranks: int) -> socket.socket:
    """Has the zygote make the process that holds the store. It ends when the returned socket is closed."""
    ours, theirs = open_channel()
    with theirs, server:
        zygote.ask("store", "store", (log, log, theirs.fileno(), server.fileno()), world_size=num_ranks)
    return ours


def make_placer(spec: LaunchSpec, address: tuple[str, int]) -> PlaceRanks:
    """How the ranks of each attempt are described."""
    run_id = _run_id(spec.torch_options)

    def place(restart: int) -> list[RankPlace]:
        return [_place(spec, address, run_id, restart, local_rank) for local_rank in range(spec.num_local_ranks)]

    return place


def _run_id(options: Mapping[str, Any]) -> str:
    if options["standalone"] or options["master_port"] is None:
        return str(uuid.uuid4())
    return str(options["rdzv_id"])


def _place(spec: LaunchSpec, address: tuple[str, int], run_id: str, restart: int, local_rank: int) -> RankPlace:
    variables = local_variables(
        spec.torch_options,
        local_rank=local_rank,
        num_ranks=spec.num_local_ranks,
        address=address,
        run_id=run_id,
        restart=restart,
        environ=os.environ,
    )
    filter_text = spec.torch_options["local_ranks_filter"]
    shown = not filter_text or local_rank in {int(part) for part in filter_text.split(",")}
    return RankPlace(local_rank, local_rank, variables | our_variables(spec.run_dir, spec.overrides), shown=shown)

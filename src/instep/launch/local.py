"""A run on this machine alone: its ranks, their address and the store in which they meet, without torch's agent."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from instep.errors import UsageError
from instep.launch.channel import open_channel
from instep.launch.console import is_live_terminal
from instep.launch.logs import plan_logs
from instep.launch.spawn import Zygote, listen
from instep.launch.worker_env import local_variables, our_variables
from instep.records.launch_spec import LaunchSpec, RankPlace
from instep.records.run_dir import RunDir

STORE_SECONDS = 10.0  # to empty the store; it takes milliseconds


def needs_agent(options: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether only torch's elastic agent can do what is asked: several nodes, or a rendezvous of the user's choice."""
    if (
        options["logs_specs"] is not None
        or options["event_log_handler"] != "null"
        or environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1"
        or "TORCHELASTIC_HEALTH_CHECK_PORT" in environ
    ):
        return True
    if options["standalone"]:
        return False
    most_nodes = str(options["nnodes"]).rpartition(":")[2]
    chosen = options["rdzv_backend"] != "static" or bool(options["rdzv_endpoint"] or options["rdzv_conf"])
    return most_nodes != "1" or chosen


def open_store(options: Mapping[str, Any]) -> tuple[socket.socket, tuple[str, int]]:
    """A listening socket for the store and the address that ranks are told. Raises UsageError for a port in use."""
    if options["standalone"] or options["master_port"] is None:
        host = options["local_addr"] or "localhost"
        server = listen(_listening_host(host), 0)
        return server, (host, server.getsockname()[1])
    host, port = options["master_addr"], options["master_port"]
    try:
        return listen(_listening_host(host), port), (host, port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--master-port {port} cannot be used on this machine: {getattr(error, 'strerror', None) or error}. "
            "Leave it out (a free port is found then), or choose another."
        ) from error


def _listening_host(host: str) -> str:
    """Nobody outside needs to reach a run on one machine, unless its address was chosen."""
    if host in ("localhost", "127.0.0.1"):
        return "127.0.0.1"
    return "::" if ":" in host else "0.0.0.0"


def start_store(zygote: Zygote, server: socket.socket, log: int, num_ranks: int) -> socket.socket:
    """Has the zygote make the process that holds the store. It ends when the returned socket is closed."""
    ours, theirs = open_channel()
    with theirs, server:
        zygote.ask("store", "store", (log, log, theirs.fileno(), server.fileno()), world_size=num_ranks)
    return ours


def empty_store(channel: socket.socket) -> None:
    """Makes the store forget the ranks of the attempt before. channel: as `start_store` gave it."""
    channel.settimeout(STORE_SECONDS)
    with contextlib.suppress(OSError):  # its process has died: the launcher hears of it and ends the run
        channel.sendall(b".")
        channel.recv(1)


def make_placer(spec: LaunchSpec, address: tuple[str, int]) -> Callable[[int], list[RankPlace]]:
    """How the ranks of each attempt are described."""
    options = spec.torch_options
    run_id = str(uuid.uuid4()) if options["standalone"] or options["master_port"] is None else options["rdzv_id"]
    run_dir = RunDir(Path(spec.run_dir))
    logs = plan_logs(options, spec.num_local_ranks, run_id, str(run_dir.torch_logs))

    def place(restart: int, local_rank: int) -> RankPlace:
        files = logs.files(local_rank, restart)
        files.setdefault("error_file", str(run_dir.rank(local_rank).torch_error))
        variables = local_variables(
            options,
            local_rank=local_rank,
            num_ranks=spec.num_local_ranks,
            address=address,
            run_id=run_id,
            restart=restart,
            environ=os.environ,
        )
        variables |= our_variables(spec.run_dir, spec.overrides, is_live_terminal(2)) | {
            "TORCHELASTIC_ERROR_FILE": files["error_file"]
        }
        return RankPlace(local_rank, local_rank, variables, **files)

    return lambda restart: [place(restart, local_rank) for local_rank in range(spec.num_local_ranks)]

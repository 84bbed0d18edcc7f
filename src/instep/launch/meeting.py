"""Where nodes meet: what can be known to be wrong with it before anything starts, and after a while of waiting."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from typing import Any

from instep.errors import UsageError

DEFAULT_PORT = 29500  # torchrun's, static rendezvous
DEFAULT_C10D_PORT = 29400
_CONNECT_SECONDS = 3.0


def read_nodes(text: str) -> tuple[int, int]:
    """`2` or `1:4`: the least and the most nodes. Raises UsageError."""
    low, colon, high = text.partition(":")
    try:
        least = int(low)
        most = int(high) if colon else least
    except ValueError:
        raise UsageError(f"--nnodes has to be a number or LEAST:MOST, as in 2 or 1:4, but is {text!r}.") from None
    if not 0 < least <= most:
        raise UsageError(
            f"--nnodes {text} asks for at least {least} and at most {most} nodes; write 1 or more, least first."
        )
    return least, most


def read_endpoint(options: Mapping[str, Any]) -> tuple[str, int] | None:
    """The address that nodes are told, or None when the rendezvous names none (as --standalone)."""
    if options["standalone"]:
        return None
    if options["rdzv_backend"] == "static" and not options["rdzv_endpoint"]:
        return options["master_addr"], options["master_port"] or DEFAULT_PORT
    host, port = _split(options["rdzv_endpoint"])
    default = DEFAULT_C10D_PORT if options["rdzv_backend"] == "c10d" else DEFAULT_PORT
    return (host, default if port is None else port) if host else None


def _split(endpoint: str) -> tuple[str, int | None]:
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or port.endswith("]"):
        return endpoint.strip().strip("[]"), None
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"--rdzv-endpoint {endpoint}: {port!r} is not a port. Write HOST:PORT, with a port up to 65535."
        )
    return host.strip("[]"), int(port)


def check_meeting(options: Mapping[str, Any]) -> None:
    """Raises UsageError for what cannot work: a rank without a place, a host without an address, a port in use."""
    _, most = read_nodes(options["nnodes"])
    static = options["rdzv_backend"] == "static" and not options["standalone"]
    if static and not 0 <= options["node_rank"] < most:
        raise UsageError(
            f"--node-rank {options['node_rank']} is not one of {most} nodes (--nnodes {options['nnodes']}). "
            f"Allowed: 0 to {most - 1}."
        )
    endpoint = read_endpoint(options)
    if endpoint is None:
        return
    if static and most > 1 and not options["rdzv_endpoint"] and endpoint[0] in ("127.0.0.1", "localhost"):
        _check_local_master(options)
    _resolve(endpoint)
    if static and options["node_rank"] == 0:
        _check_port_is_free(endpoint)


def _check_local_master(options: Mapping[str, Any]) -> None:
    if options["node_rank"] > 0 and options["master_port"] is None:
        raise UsageError(
            f"--nnodes {options['nnodes']} needs the address of node 0: --master-addr HOST --master-port PORT, "
            "the same on every node (or --rdzv-backend c10d --rdzv-endpoint HOST:PORT)."
        )


def _resolve(endpoint: tuple[str, int]) -> None:
    host, port = endpoint
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"the host {host!r} (of {host}:{port}) has no address here: {getattr(error, 'strerror', None) or error}. "
            "Check its spelling with `getent hosts`, or give its IP address."
        ) from error


def _check_port_is_free(endpoint: tuple[str, int]) -> None:
    host, port = endpoint
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise UsageError(
                    f"node 0 cannot listen on port {port} (of {host}:{port}): {error.strerror}. "
                    "Choose another port on all nodes, or end what uses it (`ss -ltnp` shows it)."
                ) from error


def describe_waiting(options: Mapping[str, Any], seconds: float) -> str:
    """Why the nodes have not met, as far as this node can see: tries the address once more."""
    least, most = read_nodes(options["nnodes"])
    count = f"{least}" if least == most else f"{least} to {most}"
    endpoint = read_endpoint(options)
    if endpoint is None:
        return f"still waiting for {count} nodes after {seconds:.0f} s"
    address = f"{endpoint[0]}:{endpoint[1]}"
    problem = try_address(endpoint)
    if problem is None:
        return (
            f"{address} answers, but after {seconds:.0f} s fewer than {count} nodes have come there. Check that every "
            f"node was started, with the same --nnodes ({options['nnodes']}), id and address; still waiting"
        )
    return (
        f"the first node cannot be reached at {address} after {seconds:.0f} s: {problem}. Check that it was started, "
        "that the address is right, and that no firewall is between; still waiting"
    )


def try_address(endpoint: tuple[str, int]) -> str | None:
    """What goes wrong on a connection to this address, or None when something listens there."""
    try:
        with socket.create_connection(endpoint, timeout=_CONNECT_SECONDS):
            return None
    except OSError as error:
        return error.strerror or f"no answer within {_CONNECT_SECONDS:.0f} s"

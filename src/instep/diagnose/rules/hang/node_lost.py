"""A node of the run is no longer heard of.

## What it sees
The launchers of all nodes speak to each other every second. One of them is silent, or its connection has closed without a
word of parting; the network interface on this side may be down.

## Why it matters
The ranks there cannot be reached either. Those of the other nodes wait for them in their next collective, for half an hour by
PyTorch's default.

## What to do
Look at the machine and the link. A link that comes back within some seconds does no harm; a node that stays away ends the
run with exit code 69.

## When it is wrong
A machine so busy that its launcher gets no processor for many seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.diagnose.hang import cite_positions
from instep.diagnose.naming import name_ranks
from instep.diagnose.run_view import RunView
from instep.records.finding import Evidence, Finding


def check(run: RunView) -> Iterator[Finding]:
    gone = [row for row in (run.nodes or {}).get("nodes", ()) if row["gone"] and _is_missed(run, row)]
    if not gone:
        return
    ranks = tuple(sorted(rank for row in gone for rank in row["ranks"]))
    interface = next((row["gone"]["interface"] for row in gone if row["gone"]["interface"]), "")
    yield Finding(
        id="hang/node-lost",
        title=" and ".join(_describe(row) for row in gone),
        cause=_why(gone[0]["gone"], interface),
        fix=_what_to_do(gone, interface),
        evidence=(*(_cite(row) for row in gone), *_cite_others(run, ranks)),
        certainty="likely" if gone[0]["gone"]["how"] == "silent" and not interface else "certain",
        ranks=ranks,
        explains=("hang/*", "crash/*", "startup/*"),
    )


def _is_missed(run: RunView, row: dict[str, Any]) -> bool:
    """A node whose ranks had all ended well before is not."""
    exits: dict[str, Any] = row.get("exits") or {}
    return len(exits) < len(row["ranks"]) or any(exit["code"] != 0 for exit in exits.values())


def _name(row: dict[str, Any]) -> str:
    return f"node {row['node']} ({row['host']}, {name_ranks(row['ranks'])})"


def _describe(row: dict[str, Any]) -> str:
    how, seconds = row["gone"]["how"], row["gone"]["seconds"]
    if how in ("silent", "lost"):
        return f"{_name(row)} has not been heard of for {seconds:.0f} s"
    return f"{_name(row)} " + ("was stopped" if how == "left" else "is lost: its launcher has died")


def _why(gone: dict[str, Any], interface: str) -> str:
    if interface:
        return f"The network interface {interface}, over which the nodes speak, is down on this machine."
    if gone["how"] == "left":
        return "Its launcher was told to stop, and has said goodbye; its ranks ended with it."
    if gone["how"] == "closed":
        return "Its connection has closed without a word: the launcher there was killed, and its ranks ended with it."
    return "Nothing comes from it any more: the machine has stopped, or the link between the nodes is down."


def _what_to_do(gone: list[dict[str, Any]], interface: str) -> tuple[str, ...]:
    if interface:
        return (f"bring {interface} up: ip link show {interface}",)
    host = gone[0]["host"]
    if gone[0]["gone"]["how"] in ("closed", "left"):
        return (f"look on {host} who ended `instep run`: the job's log, the kernel's (dmesg) for want of memory",)
    return (f"see whether {host} lives and can be reached: ping {host}", "ask who manages the network or the machines")


def _cite(row: dict[str, Any]) -> Evidence:
    gone = row["gone"]
    seen = f"last heard {gone['seconds']:.0f} s before this was noticed" + (f": {gone['why']}" if gone["why"] else "")
    return Evidence(f"{_name(row)}: {seen}", "nodes.json")


def _cite_others(run: RunView, lost: tuple[int, ...]) -> tuple[Evidence, ...]:
    positions = tuple(one for one in run.positions if one.rank not in lost and one.kind != "ended")
    return cite_positions(run, positions[:4])

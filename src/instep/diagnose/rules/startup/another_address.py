"""The ranks look for each other at an address where nobody waits for them.

## What it sees
The address that `init_process_group` was given, beside the one at which the launcher holds the ranks' store, of ranks that do not get past
that line.

## Why it matters
Under torchrun and `instep run` the store is held by the launcher, at MASTER_ADDR and MASTER_PORT of each rank's environment; no rank opens
one. A script that sets these variables itself, or names `tcp://host:port`, sends its ranks to a place where nothing is, or where another
program is, and they try again until the timeout, half an hour later.

## What to do
Leave the address to the launcher: `init_process_group("gloo")`, and no line that sets MASTER_ADDR or MASTER_PORT.

## When it is wrong
Scripts that open a store of their own at that address, which did not come up for another reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from instep.diagnose.naming import short
from instep.diagnose.rank_view import RankView
from instep.diagnose.run_view import RunView
from instep.diagnose.source import load
from instep.records.event import Event
from instep.records.finding import CallSite, Evidence, Finding


def check(run: RunView) -> Iterator[Finding]:
    found = [
        (view, event) for view in run.ranks if (event := view.last("joining")) is not None and _is_elsewhere(event)
    ]
    stuck = [(view, event) for view, event in found if not view.named("joined")]
    if not stuck or len(stuck) < len(found) or (run.stall is None and not any(view.failure for view in run.ranks)):
        return
    view, event = stuck[0]
    join = view.site(event["site"])
    where = find_setting(join) or join
    there = "another program listens" if event["taken"] else "nobody listens"
    yield Finding(
        id="startup/another-address",
        title=f"the ranks look for each other at {event['host']}:{event['port']}, where {there}",
        cause=f"{short(where)} names the address. The launcher holds the ranks' store at {event['given_host']}:{event['given_port']}, and no rank opens one of its own.",
        fix=(
            f"leave the address out at {short(where)}: the launcher sets MASTER_ADDR and MASTER_PORT for every rank",
            'call init_process_group("gloo") without init_method',
        ),
        evidence=tuple(_cite(one, row) for one, row in stuck[:4]),
        certainty="certain",
        where=where,
        explains=("hang/*", "crash/*", "startup/port-in-use"),
    )


def _is_elsewhere(event: Event) -> bool:
    """A port is enough to tell: one host has several names."""
    return bool(event.get("holds_store") and event.get("port") and event["port"] != event["given_port"])


def _cite(view: RankView, event: Event) -> Evidence:
    asked, given = f"{event['host']}:{event['port']}", f"{event['given_host']}:{event['given_port']}"
    return view.cite(f"rank {view.rank} looks at {asked}; the launcher gave it {given}")


def find_setting(join: CallSite | None) -> CallSite | None:
    """The line that sets MASTER_PORT, or MASTER_ADDR, in the script's environment; None for an init_method."""
    source = load(join.file) if join else None
    for name in ("MASTER_PORT", "MASTER_ADDR"):
        for node in ast.walk(source.tree) if source else ():
            targets = node.targets if isinstance(node, ast.Assign) else []
            keys = [target.slice for target in targets if isinstance(target, ast.Subscript)]
            if any(isinstance(key, ast.Constant) and key.value == name for key in keys):
                return source.site(node) if source else None
    return None

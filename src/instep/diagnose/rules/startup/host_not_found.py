"""The host at which the ranks were to meet has no address.

## What it sees
A look-up of the name that a rank joins by, which failed, while the rank did not get past `init_process_group`.

## Why it matters
Each rank tries again until its timeout, minutes later, and ends without a word about the name.

## What to do
Use a name that every machine resolves (`getent hosts NAME`), or an address. On one machine leave the address to the launcher.

## When it is wrong
A name server that was away for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    found = [
        (view, joining, missed)
        for view in run.ranks
        if (joining := view.last("joining")) and (missed := view.last("host-not-found")) and not view.named("joined")
    ]
    if not found or (run.stall is None and not any(view.failure for view in run.ranks)):
        return
    view, joining, missed = found[0]
    where, host = view.site(joining["site"]), missed["host"]
    ranks = tuple(one.rank for one, _, _ in found)
    some = f" on {name_ranks(ranks)}" if len(ranks) < run.world_size else ""
    yield Finding(
        id="startup/host-not-found",
        title=f"the host {host!r}, at which the ranks were to meet, has no address{some}",
        cause=f"init_process_group at {short(where)} looks for the others at {host}:{joining['port']}, and this machine cannot resolve the name.",
        fix=(
            f"check the name: getent hosts {host}",
            "or leave out init_method and MASTER_ADDR: the launcher sets them",
        ),
        evidence=(view.cite(f"look-up of {host}: {missed['error']}"),),
        certainty="certain",
        ranks=ranks if some else (),
        where=where,
        explains=("crash/*", "hang/*", "startup/another-address"),
    )

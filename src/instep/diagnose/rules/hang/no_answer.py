"""All ranks wait in the same collective, and it does not come to an end.

## What it sees
Every rank has entered the same collective, and no byte was read or written for as long as `--stall-after` says.

## Why it matters
The program is right; what is between the ranks is not: a link that is down, a firewall, a wrong network interface.

## What to do
Check that the nodes reach each other, on every port; name the interface with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.

## When it is wrong
A collective over very large tensors on a slow device.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.hang import cite_positions, classify
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    hang = classify(run)
    if hang is None or hang.kind != "no-answer":
        return
    first = hang.waiting[0]
    yield Finding(
        id="hang/no-answer",
        title=f"all ranks are in {first.operation} at {short(first.site)}, and it does not end",
        cause="Every rank has entered the same collective, but nothing passes between them.",
        fix=(
            "check that the nodes reach each other, on every port: firewalls, a link that is down, addresses of lo",
            "name the interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
        ),
        evidence=cite_positions(run, hang.waiting),
        certainty="possible",
        where=first.site,
    )

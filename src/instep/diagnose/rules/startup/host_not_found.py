"""The host at which the ranks were to meet has no address.

## What it sees
The error of a rank that joined the process group, about a name that does not resolve.

## Why it matters
Each rank tries again until its timeout, minutes later, and ends without a word about the name.

## What to do
Use a name that every machine resolves (`getent hosts NAME`), or an address. On one machine leave the address to the launcher.

## When it is wrong
A name server that was away for a moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from instep.diagnose.run_view import RunView, short, source_line
from instep.records.finding import CallSite, Finding

_UNRESOLVED = re.compile(
    r"getaddrinfo|name or service not known|name resolution|nodename nor servname|could not resolve|no address associated"
    r"|\(gai error|failed to resolve",
    re.IGNORECASE,
)
_HOST = re.compile(r"\[?([\w.-]+)\]?(?:[:, ]+(\d{2,5}))\]?|host(?:name)? '?([\w.-]+)'?")


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        error = view.error
        joined = view.named("joining") and not view.named("joined")
        if error is None or not joined or not _UNRESOLVED.search(error["message"]):
            continue
        frame = error["frames"][0] if error["frames"] else None
        where = CallSite(frame["file"], frame["line"], source_line(frame["file"], frame["line"])) if frame else None
        host = _named_host(error["message"])
        yield Finding(
            id="startup/host-not-found",
            title=f"the host{f' {host!r}' if host else ''} at which the ranks were to meet has no address",
            cause=f"{short(where)} names a host that this machine cannot resolve.",
            fix=(
                "check the name: getent hosts " + (host or "NAME"),
                "or leave out init_method and MASTER_ADDR: the launcher sets them",
            ),
            evidence=(view.cite(" ".join(error["message"].split())[:200], "failure.json"),),
            certainty="certain",
            where=where,
            explains=("crash/*", "hang/*"),
        )
        return


def _named_host(message: str) -> str:
    found = _HOST.search(message)
    return next((part for part in found.groups() if part and not part.isdecimal()), "") if found else ""

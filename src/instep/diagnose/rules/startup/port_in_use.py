"""The port on which the ranks were to meet belongs to another program.

## What it sees
An error about an address in use, raised while a rank joined the process group.

## Why it matters
Two runs on one machine with the same fixed port, or an earlier one that has not ended.

## What to do
Leave the address to the launcher: `init_process_group("gloo")` without `init_method`. Or choose another port.

## When it is wrong
When the script opens a server of its own on that port.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding

_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORT = re.compile(r"port[: ]+(\d+)|:(\d{2,5})\b")


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        error = view.error
        if error is None or not _IN_USE.search(error["message"]):
            continue
        frames = error["frames"]
        place = frames[0] if frames else None
        where = CallSite(place["file"], place["line"], source_line(place["file"], place["line"])) if place else None
        found = _PORT.search(error["message"])
        port = next((part for part in found.groups() if part), "") if found else ""
        yield Finding(
            id="startup/port-in-use",
            title=f"the port{' ' + port if port else ''} on which the ranks were to meet is in use",
            cause=f"{short(where)} opens a port that another program (or an earlier run) still holds.",
            fix=(
                "leave out init_method, MASTER_ADDR and MASTER_PORT: the launcher sets them",
                "or choose another port",
            ),
            evidence=(view.cite(error["message"].strip().splitlines()[0][:160], "failure.json"),),
            certainty="certain",
            ranks=(view.rank,),
            where=where,
            explains=("crash/*", "hang/*"),
        )
        return

"""The network interface that the ranks were told to use is not there, or has no address.

## What it sees
GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME of a rank whose process group could not be made.

## Why it matters
The variable often comes from another machine, where the interface had another name.

## What to do
Unset the variable, or name an interface of this machine: `ip -brief address` lists them.

## When it is wrong
When the group could not be made for another reason, although the interface exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.naming import short
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding

_NO_INTERFACE = re.compile(
    r"unable to find (address|interface)|no socket interface|ifname|ifa_name|unable to resolve", re.IGNORECASE
)


def check(run: RunView) -> Iterator[Finding]:
    for view in run.ranks:
        error, event = view.error, view.last("joining")
        variables: dict[str, str] = (event.get("interfaces") or {}) if event else {}
        if error is None or event is None or view.named("joined") or not variables:
            continue
        missing = [(name, value) for name, value in variables.items() if not _is_there(value, event["present"])]
        if not missing and not _NO_INTERFACE.search(error["message"]):
            continue
        name, value = missing[0] if missing else next(iter(variables.items()))
        frame = error["frames"][0] if error["frames"] else None
        where = CallSite(frame["file"], frame["line"], source_line(frame["file"], frame["line"])) if frame else None
        yield Finding(
            id="startup/wrong-interface",
            title=f"{name}={value}, but this machine has no such network interface",
            cause=f"The group made at {short(where)} was to use it; there are {', '.join(event['present'])}.",
            fix=(f"unset {name}, or set it to one of {', '.join(event['present'])}",),
            evidence=(view.cite(" ".join(error["message"].split())[:200], "failure.json"),),
            certainty="certain" if missing else "likely",
            where=where,
            explains=("crash/*", "hang/*"),
        )
        return


def _is_there(value: str, present: list[str]) -> bool:
    """Both variables take a list; NCCL's may begin with `=`, and leaves out what begins with `^`."""
    if value.startswith("^"):
        return True
    names = [name.strip() for name in value.removeprefix("=").split(",") if name.strip()]
    return any(there.startswith(name) for name in names for there in present)
